import itertools

import pytest

from rl_bench.pairs import pairwise


@pytest.mark.parametrize("sizes", [(2, 3), (3, 3, 3), (4, 7, 3, 2), (1, 5, 2), (18, 3, 2, 2)])
def test_every_two_values_of_two_parameters_meet(sizes):
    parameters = [[f"{index}{number}" for number in range(size)] for index, size in enumerate(sizes)]
    cases = pairwise(*parameters)
    assert len(cases) == len({*cases})
    for one, other in itertools.combinations(range(len(sizes)), 2):
        met = {(case[one], case[other]) for case in cases}
        assert met == {*itertools.product(parameters[one], parameters[other])}


def test_a_cover_is_much_smaller_than_the_product():
    assert len(pairwise(range(3), range(7), range(2), range(4))) <= 32, "the product has 168, and 28 is the least"
    assert pairwise("ab", "xy") == [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
