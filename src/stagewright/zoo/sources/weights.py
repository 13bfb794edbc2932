"""Weights from a local folder: safetensors files, with config.json where the model is a transformers one.

A head of another size is newly initialised and noted; anything else that is missing or misfits is an error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stagewright.errors import UsageError
from stagewright.zoo.model import ImageInput
from stagewright.zoo.quiet import quiet_transformers
from stagewright.zoo.sources.folder import checked_folder, some


def read_config(source: Path | str) -> Any:
    """The transformers configuration in a folder, remote code off."""
    import transformers

    try:
        with quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(
                str(source), trust_remote_code=False, local_files_only=True
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"config.json in {str(source)!r} can't be used: {first_line(error)}") from error
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def normalised(inputs: ImageInput, folder: Path) -> ImageInput:
    """`inputs` with the mean and deviation of pixels in the folder's preprocessor_config.json, if any."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return inputs
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        mean, std = tuple(map(float, content["image_mean"])), tuple(map(float, content["image_std"]))
    except (ValueError, KeyError, TypeError):
        return inputs
    fits = len(mean) == len(std) and len(std) in (1, inputs.channels)
    return dataclasses.replace(inputs, mean=mean, std=std) if fits else inputs


def load_pretrained(model_class: Any, config: Any, source: Path | str) -> tuple[nn.Module, tuple[str, ...]]:
    """A transformers model with the weights in `source`, as float32, and notes on what was made anew."""
    try:
        with quiet_transformers():
            module, report = model_class.from_pretrained(
                str(source),
                config=config,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
            )
    except Exception as error:  # safetensors, transformers and json each raise their own for a broken file
        raise UsageError(f"the weights in {str(source)!r} can't be loaded: {first_line(error)}") from error
    missing = set(report["missing_keys"])
    mismatched = {name: (tuple(there), tuple(here)) for name, there, here in report["mismatched_keys"]}
    in_head = head_test(module)
    lacking = sorted(name for name in missing if not in_head(name))
    if lacking:
        raise UsageError(
            f"the weights in {str(source)!r} lack {len(lacking)} tensors of {type(module).__name__}: {some(lacking)}"
        )
    _refuse_shapes(source, {name: shapes for name, shapes in mismatched.items() if not in_head(name)})
    notes = []
    fresh = sorted(missing | mismatched.keys())
    if fresh:
        notes.append(f"newly initialised, not in the weights: {some(fresh)}")
    if report["unexpected_keys"]:
        notes.append(f"in the weights but not used: {some(sorted(report['unexpected_keys']))}")
    return module.train(), tuple(notes)


def head_test(module: nn.Module) -> Callable[[str], bool]:
    """Tells whether a parameter lies in the head, outside the base model that it stands on."""
    prefix = getattr(module, "base_model_prefix", "")
    if not prefix or not hasattr(module, prefix):
        return lambda name: False
    return lambda name: not name.startswith(f"{prefix}.")


def refuse_other_size(name: str, module: nn.Module, named: nn.Module, source: Path) -> None:
    """UsageError where `module`, from the folder's config, has other shapes than the model that was named."""
    here = {key: tuple(value.shape) for key, value in named.state_dict().items()}
    there = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    different = [key for key in sorted(here.keys() | there.keys()) if here.get(key) != there.get(key)]
    if different:
        first = different[0]
        raise UsageError(
            f"the weights in {str(source)!r} are not of {name!r}: {first} is {there.get(first, 'absent')} "
            f"there and {here.get(first, 'absent')} in {name} ({len(different)} tensors differ); "
            f"load them as 'hf:{source}'"
        )


def load_state(module: nn.Module, folder: Path) -> None:
    """Loads every safetensors file of `folder` into a module of any kind; names must match."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for path in sorted(checked_folder(folder, config=False).glob("*.safetensors")):
        try:
            state |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{str(path)!r} is no safetensors file: {first_line(error)}") from error
    own = module.state_dict(keep_vars=True)
    saved_as_one = {id(own[name]) for name in state.keys() & own.keys()}  # tied tensors are saved once
    lacking = [name for name in own if name not in state and id(own[name]) not in saved_as_one]
    surplus = sorted(state.keys() - own.keys())
    if lacking or surplus:
        parts = [f"lack {some(sorted(lacking))}"] if lacking else []
        parts += [f"hold {some(surplus)}, which the model has not"] if surplus else []
        raise UsageError(f"the weights in {str(folder)!r} do not fit the model: they {' and '.join(parts)}")
    shapes = {name: (tuple(value.shape), tuple(own[name].shape)) for name, value in state.items()}
    _refuse_shapes(folder, {name: pair for name, pair in shapes.items() if pair[0] != pair[1]})
    module.load_state_dict(state, strict=False)


def _refuse_shapes(source: Path | str, wrong: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    if wrong:
        each = [f"{name} {there} there, {here} in the model" for name, (there, here) in sorted(wrong.items())]
        raise UsageError(f"the weights in {str(source)!r} have other shapes than the model: {some(each, '; ')}")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without its final stop; its class where it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__
