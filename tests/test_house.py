"""The shape of the house: who may import whom, and what is public."""

from __future__ import annotations

import ast
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import mlxmoe

PACKAGE = Path(mlxmoe.__file__).parent

# A room may import rooms on lower floors, and modules of its own folder. Written from the top down.
FLOORS = [
    ["__main__"],
    ["cli"],
    ["serving"],
    ["__init__"],
    ["tuning"],
    ["starting"],
    ["verify", "engine", "doctor"],
    ["session", "batch", "kinds"],
    ["reply", "loading"],
    ["tuned", "dividing"],
    ["balance", "decode", "hub", "stats", "text", "prompts", "opening", "transients", "identity", "weights"],
    ["growth"],
    ["sampling", "registry", "experts", "kv"],
    ["memory", "keeping", "durations"],
    ["errors", "tree", "beginning", "writing", "version"],
]
FLOOR_OF = {room: len(FLOORS) - number for number, floor in enumerate(FLOORS) for room in floor}


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(file: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mlxmoe":
            assert node.level == 0, f"{file}: imports are absolute"
            parts = node.module.split(".")
            if len(parts) > 1:
                rooms.add(parts[1])
            else:  # from mlxmoe import X: a module, or a name of the public surface
                rooms |= {alias.name if alias.name in FLOOR_OF else "__init__" for alias in node.names}
        elif isinstance(node, ast.Import):
            rooms |= {"__init__" for alias in node.names if alias.name == "mlxmoe"}
            assert not any(alias.name.startswith("mlxmoe.") for alias in node.names), f"{file}: write from ... import"
    return rooms


def test_every_room_is_on_a_floor() -> None:
    rooms = {room_of(file) for file in PACKAGE.rglob("*.py")}
    assert rooms == set(FLOOR_OF)


def test_imports_go_down_only() -> None:
    upward = [
        f"{file.relative_to(PACKAGE)} (floor {FLOOR_OF[room]}) imports {other} (floor {FLOOR_OF[other]})"
        for file in sorted(PACKAGE.rglob("*.py"))
        for room in [room_of(file)]
        for other in imported_rooms(file)
        if other != room and FLOOR_OF[other] >= FLOOR_OF[room]
    ]
    assert upward == []


def test_http_and_the_desk_meet_in_the_jobs_alone() -> None:
    serving = PACKAGE / "serving"
    for folder, other in (("http", "desk"), ("desk", "http")):
        for file in (serving / folder).glob("*.py"):
            assert f"mlxmoe.serving.{other}" not in file.read_text(encoding="utf-8"), file
    for file in (serving / "http").glob("*.py"):
        assert not {"engine", "batch", "decode", "experts", "kv", "__init__"} & imported_rooms(file), file


def test_only_the_command_line_prints_or_exits() -> None:
    for file in PACKAGE.rglob("*.py"):
        if room_of(file) in ("cli", "__main__"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("print", "exit", "quit"), f"{file}:{node.lineno}"


def test_every_module_says_what_it_owns() -> None:
    for file in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), f"{file} opens without a docstring"


def test_public_surface_is_what_all_says() -> None:
    errors = {name for name, value in vars(mlxmoe.errors).items() if isinstance(value, type)}
    assert set(mlxmoe.__all__) == errors | mlxmoe._HOMES.keys() | {"__version__"}
    assert sorted(mlxmoe.__all__) == list(mlxmoe.__all__) == dir(mlxmoe)
    assert not FLOOR_OF.keys() & set(mlxmoe.__all__), "a module, once imported, would take the place of the name"


def test_type_checkers_find_each_name_where_python_does() -> None:
    body = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body
    (block,) = (node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == mlxmoe._HOMES


def test_every_public_name_is_there_when_it_is_asked_for() -> None:
    everything: dict[str, object] = {}
    exec("from mlxmoe import *", everything)
    for name in mlxmoe.__all__:
        assert everything[name] is getattr(mlxmoe, name)
        assert not isinstance(everything[name], ModuleType)
    for name, home in mlxmoe._HOMES.items():
        assert pickle.loads(pickle.dumps(everything[name])) is everything[name], home
    with pytest.raises(ImportError, match="nothing_such"):
        exec("from mlxmoe import nothing_such")
    with pytest.raises(AttributeError, match="has no attribute 'nothing_such'"):
        _ = mlxmoe.nothing_such


@pytest.mark.parametrize("light", ["import mlxmoe; mlxmoe.MlxMoeError", "from mlxmoe.cli.commands import app"])
def test_what_need_not_be_imported_is_not(light: str) -> None:
    line = f"import sys; {light}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True, timeout=60)
    assert "mlxmoe" in done.stdout.split()
    assert not {"mlx", "mlx_lm", "numpy", "transformers", "huggingface_hub"} & set(done.stdout.split())


def test_errors_are_one_tree_drawn_in_the_docstring() -> None:
    from mlxmoe import errors

    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if drawn := re.match(r"[\s│├└─]*(\w+Error)\b", line):
            del path[drawn.start(1) // 4 - 1 :]
            parents[drawn[1]] = path[-1] if path else "Exception"
            path.append(drawn[1])
    defined = {name: value.__base__.__name__ for name, value in vars(errors).items() if isinstance(value, type)}
    assert parents == defined


def test_typed_marker_ships() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_the_demo_model_is_small_and_has_its_card() -> None:
    files = {file.name: file.stat().st_size for file in (PACKAGE / "demo").iterdir()}
    assert sum(files.values()) <= 6_000_000
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    card = (PACKAGE / "demo" / "README.md").read_text(encoding="utf-8")
    assert all(word in card for word in ("bits per byte", "King James", "Reina-Valera", "train_demo.py"))
