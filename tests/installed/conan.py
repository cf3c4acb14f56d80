#!/usr/bin/env python3
"""conan.py SOURCE WORK: runs the Conan recipe without Conan: exports, packages, and reads what it says of itself."""
import importlib.util
import shutil
import sys
import types
from pathlib import Path

source, work = Path(sys.argv[1]), Path(sys.argv[2])
calls = {}


class ConanFile:
    recipe_folder = str(source / ".github/packaging/conan")
    export_sources_folder = source_folder = str(work / "source")
    package_folder = str(work / "package")

    def __init__(self):
        self.settings = types.SimpleNamespace(os="Linux")
        self.info = types.SimpleNamespace(clear=lambda: calls.update(cleared=True))
        self.cpp_info = types.SimpleNamespace(set_property=lambda name, value: calls.update({name: value}))

    def requires(self, reference, **traits):
        calls["requires"] = reference, traits


def copy(_, pattern, src, dst):
    for file in Path(src).rglob(pattern) if "*" in pattern else [Path(src) / pattern]:
        to = Path(dst) / file.relative_to(src)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, to)


for name, members in {"conan": {"ConanFile": ConanFile}, "conan.tools": {}, "conan.tools.files": {"copy": copy},
                      "conan.tools.build": {"check_min_cppstd": lambda _, n: calls.update(standard=n)}}.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)
sys.dont_write_bytecode = True
spec = importlib.util.spec_from_file_location("conanfile", source / ".github/packaging/conan/conanfile.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
recipe = module.AttnConan()
for step in ("export_sources", "requirements", "validate", "package_id", "package", "package_info"):
    getattr(recipe, step)()
assert calls["requires"][0].startswith("eigen/") and calls["requires"][1] == {"transitive_headers": True}, calls
assert calls["cmake_target_name"] == "attn::attn" and calls["standard"] == 20, calls
