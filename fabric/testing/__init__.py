"""The conformance suite that every strategy passes, to be run over a strategy of your own.

    import pytest
    from fabric.testing import cases, check

    @pytest.mark.parametrize("case", cases(), ids=str)
    def test_my_strategy(case):
        check(MyStrategy(), case, devices=2)

It needs no test runner. A capability in the strategy's `lacks` must raise its error message; every other case must give
the numbers of one process of plain PyTorch. `verify` asks the same of a user's own program.
"""

from fabric.testing.cases import Case as Case
from fabric.testing.cases import cases as cases
from fabric.testing.checks import Finding as Finding
from fabric.testing.checks import check as check
from fabric.testing.checks import examine as examine
from fabric.testing.checks import survey as survey
from fabric.testing.drawn import Net as Net
from fabric.testing.equality import verify as verify

__all__ = ["Case", "Finding", "Net", "cases", "check", "examine", "survey", "verify"]
