"""Processes: how many, who is who, where they meet, what happens when one dies."""
