"""Names and sizes of the weights that vLLM's and SGLang's loaders of draft heads take, read from
the source in their wheels.

`python tests/draft_training/read_loader_names.py VLLM.whl SGLANG.whl` writes `tests/draft_training/loader_names.json`,
with which a test compares our exports. `pip download --no-deps vllm sglang` fetches wheels; a
folder of installed packages does as well. No code of theirs is run: constructors are read as text.
`self.fc = ReplicatedLinear(input_size=2 * H, output_size=H)` in `LlamaModel` is `fc.weight` with
the sizes ["2 * H", "H"]. What stands under a condition, and what a subclass deletes, is left out.
The engines' qkv_proj and gate_up_proj are made of the file's q_proj, k_proj, v_proj and gate_proj,
up_proj.
"""

import ast
import hashlib
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

RESULT = Path(__file__).with_name("loader_names.json")
FOLDERS = {"vllm": "vllm/model_executor/models", "sglang": "sglang/srt/models"}
KINDS = {"eagle": "llama_eagle.py", "eagle3": "llama_eagle3.py"}
ENDS = ("Linear", "RMSNorm", "Embedding", "LMHead")
SIZES = ("input_size", "output_size", "hidden_size")
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that are always run, and those for a head with an lm_head and features of several
    layers.
    """
    for line in body:
        test = ast.unparse(line.test) if isinstance(line, ast.If) else ""
        if isinstance(line, ast.With) or test.endswith("use_aux_hidden_state"):
            yield from statements(line.body)
        elif "tie_word_embeddings" in test:
            yield from statements(line.orelse)
        else:
            yield line


def modules(tree: ast.Module, name: str) -> dict[str, tuple[str, list[str]]]:
    """Attribute of class `name` -> (class, sizes as text); for lists of modules that of an element."""
    found: dict[str, tuple[str, list[str]]] = {}
    node = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    build = next(
        each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"
    )
    for line in statements(build.body):
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Call):
            call, attribute = line.value, ast.unparse(line.targets[0]).removeprefix("self.")
            kind = ast.unparse(call.func).split(".")[-1]
            if kind == "ModuleList":
                call = next(each for each in ast.walk(call.args[0]) if isinstance(each, ast.Call))
                kind = ast.unparse(call.func)
            given = [ast.unparse(each) for each in call.args[:2]]
            given += [ast.unparse(each.value) for each in call.keywords if each.arg in SIZES]
            found[attribute] = (kind, given[:2])
    return found


def weights(head: ast.Module, llama: ast.Module, causal: str) -> dict[str, list[str]]:
    """Names in a file of a head -> sizes as text: those that every such head has."""
    layer = modules(llama, "LlamaDecoderLayer")
    layer.update(modules(head, "LlamaDecoderLayer"))
    tops = modules(head, "LlamaModel") | {
        k: v for k, v in modules(head, causal).items() if k == "lm_head"
    }
    layers = {f"layers.0.{attribute}": value for attribute, value in layer.items()}
    if "del self.input_layernorm" in ast.unparse(
        head
    ):  # EAGLE's layer has none; lm_head and embedding are the target's
        del layers["layers.0.input_layernorm"]
        tops.pop("lm_head", None)
    found = {
        name: value
        for name, value in {**tops, **layers}.items()
        if name not in ("embed_tokens", "layers")
    }
    for part, inner in (("self_attn", "LlamaAttention"), ("mlp", "LlamaMLP")):
        for attribute, value in modules(llama, inner).items():
            found.setdefault(f"layers.0.{part}.{attribute}", value)
    named = {}
    for name, (kind, sizes) in found.items():
        stem, _, last = name.rpartition(".")
        if kind.endswith(ENDS):
            named |= {
                f"{stem}.{part}.weight".lstrip("."): sizes for part in PARTS.get(last, (last,))
            }
    return named


def main() -> None:
    result = {}
    for argument in map(Path, sys.argv[1:]):
        wheel = zipfile.ZipFile(argument) if argument.is_file() else None
        names = (
            wheel.namelist()
            if wheel
            else [str(path.relative_to(argument)) for path in argument.glob("*.dist-info/*")]
        )
        (about,) = (
            name
            for name in names
            if name.endswith(".dist-info/METADATA") and name.startswith(tuple(FOLDERS))
        )
        package, version = about.split(".dist-info")[0].split("-")
        folder, files = FOLDERS[package.split("_")[0]], {}
        for file in ("llama.py", *KINDS.values()):
            path = f"{folder}/{file}"
            files[file] = wheel.read(path) if wheel else (argument / path).read_bytes()
        trees = {file: ast.parse(source) for file, source in files.items()}
        result[package.split("_")[0]] = {
            "package": package,
            "version": version,
            "sha256": {file: hashlib.sha256(source).hexdigest() for file, source in files.items()},
            "renames midlayer": b"midlayer" in files[KINDS["eagle3"]],
            **{
                kind: weights(trees[file], trees["llama.py"], last_class(trees[file]))
                for kind, file in KINDS.items()
            },
        }
    RESULT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")


def last_class(tree: ast.Module) -> str:
    return [each.name for each in tree.body if isinstance(each, ast.ClassDef)][-1]


if __name__ == "__main__":
    main()
