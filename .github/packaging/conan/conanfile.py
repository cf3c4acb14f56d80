# conan create .github/packaging/conan: the headers of the tree that this file lies in, with Eigen.
import os

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.files import copy


class AttnConan(ConanFile):
    name = "attn"
    version = "0.3.0"
    description = "Efficient attention operators for the CPU"
    license = "MIT"
    topics = ("attention", "transformer", "simd", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    @property
    def _tree(self):
        return os.path.abspath(os.path.join(self.recipe_folder, "..", "..", ".."))

    def export_sources(self):
        copy(self, "*.hpp", os.path.join(self._tree, "include"), os.path.join(self.export_sources_folder, "include"))
        copy(self, "LICENSE", self._tree, self.export_sources_folder)

    def requirements(self):
        self.requires("eigen/[>=3.4.0 <6]", transitive_headers=True)

    def validate(self):
        check_min_cppstd(self, 20)

    def package_id(self):
        self.info.clear()

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        copy(self, "*.hpp", os.path.join(self.source_folder, "include"), os.path.join(self.package_folder, "include"))

    def package_info(self):
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        self.cpp_info.set_property("cmake_file_name", "attn")
        self.cpp_info.set_property("cmake_target_name", "attn::attn")
        if self.settings.os in ("Linux", "FreeBSD"):
            self.cpp_info.system_libs = ["pthread"]
