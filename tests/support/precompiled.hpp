// What all tests include, for CMake to compile once.
#pragma once

#include <attn/attn.hpp>

#include "support/catch.hpp"
