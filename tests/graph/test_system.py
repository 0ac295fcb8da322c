"""Equalities of sizes, solved over symbols."""

from __future__ import annotations

import pytest
import sympy

from bp_convert.widths.new_sizes import NewSizes, Widenable
from bp_convert.widths.symbols import Equality, Origin
from bp_convert.widths.system import System, holds, number

a, b, c, given = (sympy.Symbol(n, integer=True, positive=True) for n in ("a", "b", "c", "given"))


def equal(left: sympy.Expr, right: sympy.Expr | int, note: str = "somewhere") -> Equality:
    return Equality(sympy.sympify(left), sympy.sympify(right), Origin("", "", 0, note=note))


def test_equal_symbols_become_one_and_the_first_chosen_stays() -> None:
    system = System([equal(b, a), equal(c, b)], [a, b, c])
    assert {system.resolve(s) for s in (a, b, c)} == {a}


def test_common_factors_cancel() -> None:
    system = System([equal(49 * a, 49 * b)], [a, b])
    assert system.resolve(b) == a


def test_a_multiple_replaces_the_larger() -> None:
    system = System([equal(a, 3 * c)], [a])
    assert system.resolve(a) == 3 * c


def test_a_given_width_may_be_any_sum() -> None:
    system = System([equal(given, a + b - 2 * c)], [a, b], [given])
    assert system.resolve(given) == a + b - 2 * c
    assert system.rest == []


def test_a_chosen_width_never_follows_a_sum() -> None:
    system = System([equal(a, b + c)], [a, b, c])
    assert system.resolve(a) == a
    assert len(system.rest) == 1


def test_products_and_divisions_wait_until_they_become_linear() -> None:
    system = System([equal(a * b, 12), equal(b, 3)], [a, b])
    assert system.resolve(a) == 4
    assert system.rest == []


def test_the_reason_is_the_first_equality_that_brings_a_number() -> None:
    system = System(
        [equal(b, a, "an addition"), equal(4 * a, 64, "a view"), equal(c, b, "later")], [a, b, c]
    )
    assert system.resolve(c) == 16
    why = system.why_fixed(c)
    assert why is not None
    assert str(why.origin) == "a view"
    assert System([]).why_fixed(a) is None


def test_numbers() -> None:
    assert number(a / 2, {a: 8}) == 4
    assert number(a / 2, {a: 7}) is None
    assert holds(equal(a + b, 5), {a: 2, b: 3})
    assert not holds(equal(a + b, 5), {a: 2, b: 4})


def chosen(
    equalities: list[Equality], sizes: dict[sympy.Symbol, int], squared: dict[str, bool]
) -> NewSizes:
    symbols = {"a": a, "b": b, "c": c}
    system = System(equalities, [symbols[n] for n in squared])
    free = {s: v for s, v in sizes.items() if s not in system.replaced}
    wishes = {name: Widenable(symbols[name], is_conv) for name, is_conv in squared.items()}
    return NewSizes(system, free, wishes, 3)


def test_convolutions_alone_are_widened_by_the_square() -> None:
    choice = chosen([], {a: 4, b: 5}, {"a": True, "b": False})
    choice.settle()
    assert (choice.new(a), choice.new(b)) == (36, 15)


def test_a_sum_that_ties_both_makes_one_group() -> None:
    choice = chosen([equal(a + b, 2 * c)], {a: 4, b: 4, c: 4}, {"a": True, "b": False, "c": False})
    choice.settle()
    assert choice.new(a) == choice.new(b) == choice.new(c) == 12
    assert choice.groups() == [frozenset({"a", "b", "c"})]


def test_what_belongs_to_nobody_follows() -> None:
    choice = chosen([equal(a * a, b * b)], {a: 4, b: 4}, {"a": False})
    choice.settle()
    assert choice.new(b) == 12


def test_a_frozen_partner_freezes_the_group() -> None:
    choice = chosen([equal(a + b, 2 * c)], {a: 4, b: 4, c: 4}, {"a": False, "b": False, "c": False})
    choice.freeze([b], "because")
    choice.settle()
    assert choice.new(b) == 4
    assert choice.new(a) + 4 == 2 * choice.new(c)


def test_freezing_holds_for_the_whole_group_and_keeps_the_first_reason() -> None:
    choice = chosen([equal(a, b)], {a: 4}, {"a": False, "b": True})
    choice.freeze(choice.roots["b"], "first")
    choice.freeze(choice.roots["a"], "second")
    choice.settle()
    assert choice.new(a) == 4
    assert choice.reason("a") == choice.reason("b") == "first"


def test_a_size_without_a_whole_value_is_an_error() -> None:
    choice = chosen([], {a: 5}, {"a": False})
    choice.settle()
    with pytest.raises(ArithmeticError, match="no whole value"):
        choice.new(a / 2)
