#!/bin/sh
# Runs the tests that multiply matrices against oneDNN 3.x, whose API differs from Debian's 2.6. The library comes from
# PyPI (unpacked under build/, 54 MB); where that cannot be reached the check is skipped, and says so.
set -eu
cd "$(dirname "$0")/.."
mkdir -p build/onednn3
if [ ! -e build/onednn3/lib/libdnnl.so.3 ]; then
    if ! python3 -m pip download -q --no-deps -d build/onednn3 onednn-cpu-gomp==2023.2.0 \
        onednn-devel-cpu-gomp==2023.2.0 2> build/onednn3/log; then
        echo "oneDNN 3.x: skipped, the packages cannot be had here (build/onednn3/log)"
        exit 0
    fi
    for wheel in build/onednn3/*.whl; do python3 -m zipfile -e "$wheel" build/onednn3/unpacked; done
    cp -r build/onednn3/unpacked/*.data/data/* build/onednn3/
    rm -rf build/onednn3/unpacked build/onednn3/*.whl
fi
make -s --no-print-directory DNNL=build/onednn3 CFLAGS="-O1 -march=native" build/onednn3/test_gpt
for name in matmul model; do OMP_WAIT_POLICY=passive build/onednn3/test_gpt $name > build/onednn3/log || {
    cat build/onednn3/log
    exit 1
}; done
echo "oneDNN 3.x: the products and the model are right"
