"""Import every module of an installed cirkit: run inside an environment that has the wheel and nothing for development.

The argument `with-zoo` says that the repository ships weights, so that the wheel must too."""
import importlib, pkgutil, sys
import cirkit

names = sorted(m.name for m in pkgutil.walk_packages(cirkit.__path__, "cirkit."))
for name in names: importlib.import_module(name)
developer_tools = {"nbdev", "fastcore", "execnb"} & set(sys.modules)
assert not developer_tools, f"the installed package imports {sorted(developer_tools)}"
from cirkit import paths
assert paths.root() is None, f"{paths.root()}: this is a clone, not an installed wheel"
assert paths.published("edir", "averages").stat().st_size > 0
if "with-zoo" in sys.argv: assert (paths.data_dir() / "zoo/world-clip/record.json").is_file(), "the wheel lacks the shipped weights"
print(f"{len(names)} modules import; data in place")
