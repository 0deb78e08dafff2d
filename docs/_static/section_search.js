/* Ranks sections by BM25 over title, titles above, and text (section_search.py writes the index). It replaces the ranking
   of Sphinx's search, and leaves its box, its page and its list of results as they are. */
"use strict";

const WEIGHTS = [6, 2.5, 1]; // a word of the title, of the titles above, of the text
const SATURATION = 1.2, LENGTH = 0.6;
const PARTS = { "how-to": 1.15, tutorial: 1.05, reference: 0.85, measurements: 0.85 }; // who asks wants to know how first
const PAGES = { "reference/errors": 0.7 }; // long lists, in which most words are somewhere
const ASKING = new Set("how do does did i can could we my our what when which why should you please am".split(" "));

function termsOf(query) {
  const stemmer = new Stemmer();
  const words = query.toLowerCase().match(/[\p{L}\p{N}]+(?:_[\p{L}\p{N}]+)*/gu) || [];
  const isStopword = (word) => (stopwords.has ? stopwords.has(word) : stopwords.includes(word));
  const kept = words.filter((word) => !isStopword(word) && !ASKING.has(word));
  return (kept.length ? kept : words).map((word) => stemmer.stemWord(word));
}

function sectionResults(query) {
  const terms = [...new Set(termsOf(query))];
  const { documents, index } = SECTIONS;
  const average = documents.reduce((sum, each) => sum + each[5], 0) / documents.length;
  const scores = new Map();
  for (const term of terms) {
    const found = Object.hasOwn(index, term) ? index[term] : [];
    const rarity = Math.log(1 + (documents.length - found.length + 0.5) / (found.length + 0.5));
    for (const [number, title, above, text] of found) {
      const size = 1 - LENGTH + LENGTH * documents[number][5] / average;
      const count = WEIGHTS[0] * Math.min(title, 1) + WEIGHTS[1] * Math.min(above, 1) + WEIGHTS[2] * text / size;
      const entry = scores.get(number) || [0, 0];
      entry[0] += rarity * count / (count + SATURATION);
      entry[1] += rarity;
      scores.set(number, entry);
    }
  }
  const sum = terms.reduce((total, term) => {
    const found = Object.hasOwn(index, term) ? index[term].length : 0;
    return total + (found ? Math.log(1 + (documents.length - found + 0.5) / (found + 0.5)) : 0);
  }, 0);
  const results = [...scores].map(([number, [score, matched]]) => {
    const [page, title, anchor, above, text] = documents[number];
    const head = termsOf(title.split(":")[0]), titleTerms = new Set(termsOf(title));
    const exact = terms.every((term) => titleTerms.has(term)) ? 1.25 : 1; // the title has all words of the query
    const said = head.filter((term) => terms.includes(term)).length / Math.max(head.length, 1); // the title says no more
    const weight = (PAGES[page] || PARTS[page.split("/")[0]] || 1) * exact * (1 + 0.3 * said) * (matched / sum) ** 1.5;
    const name = above ? `${title} (${above.split(" > ").pop()})` : title;
    return [page, name, anchor, text, score * weight, page, "title"];
  });
  results.sort((left, right) => left[4] - right[4]); // Sphinx shows them from the last on
  return results.slice(-40);
}

if (typeof Search !== "undefined" && typeof SECTIONS !== "undefined") {
  Search._performSearch = () => sectionResults(new URLSearchParams(window.location.search).get("q") || "");
}
