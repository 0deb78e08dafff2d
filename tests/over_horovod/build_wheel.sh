#!/usr/bin/env bash
# Build Horovod's wheel for the torch of a Python, from the unpatched source release: build_wheel.sh PYTHON FOLDER
# Takes a minute on two cores and needs g++. Nothing is optimised: its speed is not what is tested. What is
# needed to build goes to a folder of its own and is removed.
#
# Horovod 0.28.1 asks for C++14 with the last word on the compiler's command line, and torch's headers want C++17 or
# later: so the compiler is a script that has the very last word. Horovod's main branch needs none (#3998).
# Its CMake files are too old for CMake 4, its setup.py for setuptools 81. Its build imports torch, the one that is here.
# Ten files are compiled as one, which reads torch's headers once: 100 s of processor time in place of 160. A toolchain
# file is CMake's way to ask for that from outside. In Horovod's copy of gloo, two files mean different things by one name.
set -euo pipefail
python=$(command -v "$1")
folder=$2

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
printf '#!/bin/sh\nexec g++ "$@" -std=c++17 -O0 -g0 -w\n' > "$build/c++17"
chmod +x "$build/c++17"
"$python" -m pip install --quiet --target "$build/tools" \
    'setuptools<81' wheel 'cmake>=3.13,<4' 'cffi>=1.4' cloudpickle packaging psutil pyyaml

export PYTHONPATH="$build/tools" PATH="$build/tools/bin:$PATH" CXX="$build/c++17" MAKEFLAGS="-j$(nproc)"
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
echo 'set(CMAKE_UNITY_BUILD OFF)' > "$build/gloo.cmake"
printf '%s\n' 'set(CMAKE_UNITY_BUILD ON)' 'set(CMAKE_UNITY_BUILD_BATCH_SIZE 10)' \
    "set(CMAKE_PROJECT_gloo_INCLUDE $build/gloo.cmake)" > "$build/toolchain.cmake"
export CMAKE_TOOLCHAIN_FILE="$build/toolchain.cmake"
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
# Not from pip's cache, whose wheels are named after the source alone: one may be for another torch.
"$python" -m pip wheel --quiet --no-cache-dir --no-deps --no-build-isolation --no-binary horovod \
    --wheel-dir "$folder" 'horovod==0.28.1'
