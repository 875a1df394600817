"""Cases that the ordinary suite leaves out are in the slow one, and no test loses a value of its parameters."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(("every", "ordinary"), [(1, 12), (3, 4), (5, 2), (100, 1)])
def test_every_case_is_in_one_of_the_two(pytester: pytest.Pytester, every: int, ordinary: int) -> None:
    pytester.makeini("[pytest]\nmarkers =\n  slow: x\n  thinned(n): x\n")
    pytester.makeconftest(
        "import pytest\nfrom tests.thinning import thin_out\n\n"
        "@pytest.hookimpl(tryfirst=True)\ndef pytest_collection_modifyitems(items):\n    thin_out(items)\n"
    )
    pytester.makepyfile(
        "import pytest\n\n@pytest.mark.thinned(" + str(every) + ")\n"
        "@pytest.mark.parametrize('a', range(4))\n@pytest.mark.parametrize('b', range(3))\n"
        "def test_it(a, b):\n    pass\n\ndef test_other():\n    pass\n"
    )
    quick = pytester.inline_run("-m", "not slow")
    slow = pytester.inline_run("-m", "slow")
    quick.assertoutcome(passed=ordinary + 1)
    if ordinary >= 4:
        kept = [call.item.callspec.params for call in quick.getcalls("pytest_runtest_call") if "[" in call.item.name]
        assert {each["a"] for each in kept} == set(range(4)) and {each["b"] for each in kept} == set(range(3))
    names = [{call.item.name for call in run.getcalls("pytest_runtest_call")} for run in (quick, slow)]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 13
