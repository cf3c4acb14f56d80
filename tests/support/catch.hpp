#pragma once
// Catch2 v3 where it is installed, else the single header of v2.13: the macros we use are in both.
#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#else
#include <catch2/catch.hpp>
#endif
