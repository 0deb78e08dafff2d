from __future__ import annotations

import pytest

from fabric.output.callbacks import call


class Recorder:
    def __init__(self, name: str, calls: list[object]) -> None:
        self.name, self.calls = name, calls

    def on_step(self, step: int, *, loss: float = 0.0) -> None:
        self.calls.append((self.name, step, loss))


class Deaf:
    pass


def test_every_callback_that_has_the_hook_is_called_in_order() -> None:
    calls: list[object] = []
    call([Recorder("first", calls), Deaf(), Recorder("second", calls)], "on_step", 3, loss=0.5)
    assert calls == [("first", 3, 0.5), ("second", 3, 0.5)]


def test_a_hook_that_no_callback_has_calls_nothing() -> None:
    call([Deaf(), Recorder("one", [])], "on_nothing", 1)


def test_an_attribute_that_is_no_method_is_named() -> None:
    with pytest.raises(TypeError, match=r"`Recorder\.name` is a `str`, which cannot be called\. A hook is a method"):
        call([Recorder("one", [])], "name")


def test_hook_arguments_may_have_the_names_of_parameters_of_call() -> None:
    class Open:
        def on_any(self, **kwargs: object) -> None:
            self.kwargs = kwargs

    callback = Open()
    call([callback], "on_any", hook=1, callbacks=2)
    assert callback.kwargs == {"hook": 1, "callbacks": 2}


def test_an_exception_of_a_callback_reaches_the_caller_and_later_callbacks_are_not_called() -> None:
    class Failing:
        def on_step(self, step: int) -> None:
            raise KeyError(step)

    calls: list[object] = []
    with pytest.raises(KeyError):
        call([Failing(), Recorder("after", calls)], "on_step", 1)
    assert calls == []
