#!/usr/bin/python3
"""What attn_bench and bench/run say to a command line: command.py [ATTN_BENCH]. Without the program only what needs none."""
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"
PROGRAM = sys.argv.pop() if len(sys.argv) > 1 else None
TINY = ("--benchmark_filter=^linear/", "--min-length=16", "--max-length=16", "--budget=0", "--benchmark_min_time=0.001")


def run(*arguments, stdout=subprocess.PIPE):
    return subprocess.run(arguments, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)


def npy(path, shape, number=1.0):
    count = 1
    for n in shape:
        count *= n
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({', '.join(map(str, shape))}), }}\n".encode()
    numbers = b"" if count > 1 << 20 else b"".join(struct.pack("<f", number * (1 + n % 7)) for n in range(count))
    Path(path).write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + numbers)


class Help(unittest.TestCase):
    def test_at_once_and_without_a_compiler(self):
        begun = time.monotonic()
        for arguments, part in ((("--help",), "--window=128"), (("--threads=2", "-h"), "--input=DIR"),
                                (("--mpi", "--help"), "--kv-heads")):
            environment = {**os.environ, "CXX": "false", "CMAKE": "false"}
            done = subprocess.run([BENCH / "run", *arguments], capture_output=True, text=True, env=environment)
            self.assertEqual(done.returncode, 0)
            self.assertIn("bench/run --smoke", done.stdout)
            self.assertIn(part, done.stdout)
        self.assertLess(time.monotonic() - begun, 30)


    def test_help_of_attn_bench_mpi_is_what_it_prints(self):
        program = (BENCH / "mpi" / "main.cpp").read_text()
        flags = re.findall(r'^    \{"([a-z-]+)", &settings::\w+, [^,]+, "(.*)"\},$', program, re.MULTILINE)
        first = re.search(r'std::puts\("(.*)\\n"\);\n  for \(.*std::printf\("  --%-(\d+)s %s\\n"', program)
        self.assertEqual(len(flags), program.count("&settings::"))
        lines = [first[1], ""] + [f"  --{name:{first[2]}} {text}" for name, text in flags]
        self.assertEqual((BENCH / "mpi" / "help.txt").read_text(), "\n".join(lines) + "\n")


@unittest.skipUnless(PROGRAM, "no program is given")
class Program(unittest.TestCase):
    def refused(self, *arguments, says):
        done = run(PROGRAM, *arguments)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, says)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)  # nothing was measured before
        return done

    def test_help_is_what_the_script_prints(self):
        self.assertTrue(run(PROGRAM, "--help").stdout.startswith((BENCH / "help.txt").read_text()))

    def test_numbers_beyond_what_is_sensible(self):
        self.refused("--threads=100000", says="--threads expects a number <= 1024; found \"100000\"")
        self.refused("--virtual-threads=100000", says="--virtual-threads expects a number <= 1024")
        self.refused("--max-length=99999999999999999999", says="--max-length expects a number <= 1099511627776")
        self.refused("--heads=0", says="--heads expects a number >= 1; found \"0\"")

    @unittest.skipUnless(hasattr(os, "sched_getaffinity"), "how many processors there are is not known")
    def test_several_threads(self):
        processors = len(os.sched_getaffinity(0))
        done = run(PROGRAM, *TINY, f"--threads={processors + 1}")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, rf"\n{processors + 1} threads on {processors} processors? take turns")
        self.assertRegex(done.stdout, rf"\n{processors + 1} threads at once: [\d.]+ Gflop/s, [\d.]+ of as many alone\n")
        self.assertRegex(done.stdout, rf"\n{processors + 1} threads at once: [\d.]+ GB/s read")
        self.assertRegex(done.stdout, rf"linear/16 .* [\d.]+ of {processors + 1} processes")
        self.assertIn(f"efficiency: calls per second over those that {processors + 1} processes", done.stdout)

    def test_filters(self):
        self.refused("--benchmark_filter=nothing", says="--benchmark_filter expects .*; found \"nothing\", which no name")
        self.refused("--benchmark_filter=(", says="--benchmark_filter expects a regular expression; found \"\\(\"")
        self.refused("--min-length=512", "--max-length=256", says="expected a length from --min-length to --max-length")

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full")
    def test_full_disks(self):
        done = run(PROGRAM, *TINY, "--benchmark_out=/dev/full")
        self.assertEqual(done.returncode, 1)
        self.assertIn("results could not be written (--benchmark_out)", done.stderr)
        for arguments in ((), ("--benchmark_format=csv",), ("--benchmark_list_tests",), ("--help",)):
            with open("/dev/full", "w") as full:
                done = run(PROGRAM, *TINY, *arguments, stdout=full)
            self.assertEqual(done.returncode, 1)
            self.assertIn("standard output cannot be written", done.stderr)

    def test_data_that_has_no_error(self):
        shape = (1, 2, 16, 8)
        with tempfile.TemporaryDirectory() as folder:
            def write(k_shape=shape, **numbers):
                for name in "qkv":
                    npy(f"{folder}/{name}.npy", k_shape if name == "k" else shape, numbers.get(name, 1.0))
                return f"--input={folder}"

            self.refused(write(v=0.0), says="v.npy: expected values that are not all 0")
            self.refused(write(q=float("nan")), says="q.npy: expected finite numbers; found -?nan")
            for extent in (10**30, 2**63, 2**40, -3):
                self.refused(write(k_shape=(1, 2, extent, 8)), says="k.npy: expected the shape of an array; found \\(1, 2, ")
            self.refused(write(), "--heads=3", says="--heads expects 2, which the data of --input has")

    def test_own_data_is_measured_at_its_length(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in "qkv":
                npy(f"{folder}/{name}.npy", (1, 2, 40, 8))
            done = run(PROGRAM, f"--input={folder}", "--benchmark_filter=^(full_softmax|block|nystrom)(_causal)?/",
                       "--max-length=64", "--budget=0", "--benchmark_min_time=0.001")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("time at 40", done.stdout)
        self.assertIn("2 heads of 8", done.stdout)
        self.assertNotIn("bench/data", done.stdout)
        self.assertIn("sees every token of the data", done.stdout)  # block's 128


if __name__ == "__main__":
    unittest.main(verbosity=2)
