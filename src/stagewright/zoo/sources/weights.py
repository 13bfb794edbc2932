"""Weights from a local folder: safetensors files, with config.json for a transformers model.

A head of another size is newly initialized, with a note; other missing or mismatched tensors are an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stagewright.errors import UsageError
from stagewright.extras import require
from stagewright.files.json_values import read_object_or_empty
from stagewright.zoo.checkpoint_names import missing_experts
from stagewright.zoo.model import ImageInput
from stagewright.zoo.quiet import quiet_transformers
from stagewright.zoo.sources.folder import abbreviate, check_folder
from stagewright.zoo.weight_files import find_tensors


def read_config(source: Path | str) -> Any:
    """Read the transformers configuration in a folder, without remote code."""
    require("transformers", f"the model in {str(source)!r}")
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


def with_normalization(inputs: ImageInput, folder: Path) -> ImageInput:
    """Set the pixel mean and standard deviation from the folder's preprocessor_config.json, if any."""
    content = read_object_or_empty(folder / "preprocessor_config.json")
    try:
        mean, std = tuple(map(float, content["image_mean"])), tuple(map(float, content["image_std"]))
    except (ValueError, KeyError, TypeError):
        return inputs
    fits = len(mean) == len(std) and len(std) in (1, inputs.channels)
    return dataclasses.replace(inputs, mean=mean, std=std) if fits else inputs


def load_pretrained(model_class: Any, config: Any, source: Path | str) -> tuple[nn.Module, tuple[str, ...]]:
    """Load a transformers model from `source` as float32, with notes about newly initialized tensors."""
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
    except Exception as error:  # safetensors, transformers and json raise different errors for a broken file
        _check_experts(model_class, config, source)
        raise UsageError(f"the weights in {str(source)!r} can't be loaded: {first_line(error)}") from error
    missing = set(report["missing_keys"])
    mismatched = {name: (tuple(saved), tuple(expected)) for name, saved, expected in report["mismatched_keys"]}
    in_head = _head_test(module)
    lacking = sorted(name for name in missing if not in_head(name))
    wrong_shapes = {name: shapes for name, shapes in mismatched.items() if not in_head(name)}
    if lacking or wrong_shapes:
        _check_experts(model_class, config, source)
        _check_present(source, type(module).__name__, lacking)
        _check_shapes(source, wrong_shapes)
    notes = []
    new = sorted(missing | mismatched.keys())
    if new:
        notes.append(f"newly initialized, not in the weights: {abbreviate(new)}")
    if report["unexpected_keys"]:
        notes.append(f"in the weights but not used: {abbreviate(sorted(report['unexpected_keys']))}")
    return module.train(), tuple(notes)


def _check_experts(model_class: Any, config: Any, source: Path | str) -> None:
    """Raise UsageError if the files lack tensors of some experts; transformers reports a wrong shape, or no names."""
    try:
        with torch.device("meta"):
            missing = missing_experts(model_class(config), find_tensors(Path(source)))
    except Exception:  # a damaged file, or a configuration that the class refuses: the first error says so
        return
    _check_present(source, model_class.__name__, missing)


def _check_present(source: Path | str, model: str, lacking: list[str]) -> None:
    if lacking:
        tensors = f"{len(lacking)} tensor{'s' if len(lacking) > 1 else ''}"
        raise UsageError(
            f"the weights in {str(source)!r} lack {tensors} of {model}: {abbreviate(lacking)}; add them to the files, "
            "or build the model without these weights (--weights random)"
        )


def _head_test(module: nn.Module) -> Callable[[str], bool]:
    """Return a function that says whether a parameter belongs to the head, outside the base model."""
    prefix = getattr(module, "base_model_prefix", "")
    if not prefix or not hasattr(module, prefix):
        return lambda name: False
    return lambda name: not name.startswith(f"{prefix}.")


def check_same_shapes(name: str, module: nn.Module, named: nn.Module, source: Path) -> None:
    """Raise UsageError if `module`, from the folder's configuration, has other shapes than the named model."""
    expected = {key: tuple(value.shape) for key, value in named.state_dict().items()}
    actual = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    different = [key for key in sorted(expected.keys() | actual.keys()) if expected.get(key) != actual.get(key)]
    if different:
        first = different[0]
        raise UsageError(
            f"the weights in {str(source)!r} do not belong to {name!r}: {first} is {actual.get(first, 'missing')} in "
            f"the weights and {expected.get(first, 'missing')} in {name} ({len(different)} tensors differ); "
            f"load them as 'hf:{source}'"
        )


def load_state(module: nn.Module, folder: Path) -> None:
    """Load every safetensors file of `folder` into any module; names must match."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for path in sorted(check_folder(folder, config=False).glob("*.safetensors")):
        try:
            state |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{str(path)!r} is not a safetensors file: {first_line(error)}") from error
    expected = module.state_dict(keep_vars=True)
    present = {id(expected[name]) for name in state.keys() & expected.keys()}  # tied tensors are saved once
    lacking = [name for name in expected if name not in state and id(expected[name]) not in present]
    surplus = sorted(state.keys() - expected.keys())
    if lacking or surplus:
        parts = [f"lack {abbreviate(sorted(lacking))}"] if lacking else []
        parts += [f"contain {abbreviate(surplus)}, which the model does not have"] if surplus else []
        raise UsageError(f"the weights in {str(folder)!r} do not fit the model: they {' and '.join(parts)}")
    shapes = {name: (tuple(value.shape), tuple(expected[name].shape)) for name, value in state.items()}
    _check_shapes(folder, {name: pair for name, pair in shapes.items() if pair[0] != pair[1]})
    module.load_state_dict(state, strict=False)


def _check_shapes(source: Path | str, mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    if mismatched:
        pairs = [f"{name} is {saved} instead of {expected}" for name, (saved, expected) in sorted(mismatched.items())]
        raise UsageError(f"the weights in {str(source)!r} have other shapes than the model: {abbreviate(pairs, '; ')}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text without a final period, or its class if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__
