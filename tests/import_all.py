"Import every module of an installed cirkit: run inside an environment that has the wheel and nothing for development."
import importlib, pkgutil, sys
import cirkit

names = sorted(m.name for m in pkgutil.walk_packages(cirkit.__path__, "cirkit."))
for name in names: importlib.import_module(name)
developer_tools = {"nbdev", "fastcore", "execnb"} & set(sys.modules)
assert not developer_tools, f"the installed package imports {sorted(developer_tools)}"
assert "/data" in str(cirkit.paths.data_dir()), cirkit.paths.data_dir()
print(f"{len(names)} modules import; data in place")
