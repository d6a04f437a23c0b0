# SPDX-License-Identifier: Apache-2.0
"""Backwards that have no derivative of their own."""

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["first_order"]


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of an ``autograd.Function``'s backward: an error where it is to be differentiated again.

    torch's ``once_differentiable`` raises where the second backward comes by. ``torch.autograd.grad`` of inputs on
    another path does not come by, and returns what is left of the second derivative without a word.

    Raises:
        RuntimeError: ``create_graph=True``.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a backward that is compiled is traced so
            raise RuntimeError(
                "needed a backward without create_graph, as an aligned model has no second derivative; got "
                "create_graph=True; undo() the alignment first"
            )
        return backward(ctx, *gradients)

    return run
