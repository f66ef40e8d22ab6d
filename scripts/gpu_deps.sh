#!/bin/sh
# Collects what CUDA builds need beside CUDA (jansson and PCRE2; for the tests oneDNN and OpenBLAS) from this machine into
# build/deps and build/deps.tar.gz: for a GPU machine that has none of it and cannot install it. Its C library must not
# be older than this machine's. There, in the checkout:
#   DEPS=build/deps.tar.gz scripts/gpu_check.sh
#   make train DEVICE=cuda DEPS=build/deps
# include/, lib/: for the compiler and the program; gomp/: OpenMP's library, for machines without one only, since
# compilers newer than this machine's need a newer one.
set -eu
cd "$(dirname "$0")/.."
to=build/deps
rm -rf $to $to.tar.gz
mkdir -p $to/include $to/lib $to/gomp

printf '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <jansson.h>\n#include <dnnl.h>\n#include <pcre2.h>\n' | ${CC:-cc} -M -x c - | sed 's/ /\n/g' | grep -E 'jansson|dnnl|pcre2' |
    while read -r header; do
        inside=$(echo "${header##*/include/}" | sed "s|^$(${CC:-cc} -print-multiarch)/||")
        mkdir -p "$to/include/$(dirname "$inside")"
        cp "$header" "$to/include/$inside"
    done

echo 'int main(void) { return 0; }' |
    ${CC:-cc} -x c - -o $to/all -fopenmp -Wl,--no-as-needed -ldnnl -lopenblas -ljansson -lpcre2-8
ldd $to/all | awk '$3 ~ /^\// { print $1, $3 }' | while read -r name path; do
    case $name in
    libc.* | libm.* | libdl.* | librt.* | libpthread.* | libgcc_s.* | libstdc++.*) continue ;; # every machine's own
    libgomp.*) cp -L "$path" "$to/gomp/$name" ;;
    *) cp -L "$path" "$to/lib/$name" ;;
    esac
    case $name in # the names that -l looks for
    libdnnl.* | libopenblas.* | libjansson.* | libpcre2-8.*) ln -s "$name" "$to/lib/${name%%.so*}.so" ;;
    libgomp.*) ln -s "$name" "$to/gomp/libgomp.so" ;;
    esac
done
rm $to/all
tar -C build -czf $to.tar.gz deps
du -sh $to $to.tar.gz
