#!/usr/bin/env bash
# llama.cpp's benchmark and perplexity tools and its server, from the source inside the Python package llama-cpp-python.
#
#   bench/peers/build_llama_cpp.sh FOLDER      ends with FOLDER/build/bin/llama-bench and llama-server; about 20 minutes on two cores
#
# Needs pip, cmake, ninja and a C++ compiler. Built for the machine it runs on.
set -eu
version=0.3.36
folder=${1:?the folder to build in}
mkdir -p "$folder"
folder=$(cd -P "$folder" && pwd)   # a path with a symbolic link makes ninja generate its files again and again
if [ ! -d "$folder/llama_cpp_python-$version" ]; then
  (cd "$folder" && pip download --quiet --no-deps --no-binary llama-cpp-python "llama-cpp-python==$version" &&
     tar xzf "llama_cpp_python-$version.tar.gz")
fi
cmake -S "$folder/llama_cpp_python-$version/vendor/llama.cpp" -B "$folder/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF
ninja -C "$folder/build" llama-bench llama-perplexity llama-server
