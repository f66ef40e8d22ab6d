#!/bin/sh
# Installs what meshtune is built with, if it is missing. Debian and Ubuntu through apt; elsewhere it says what to get.
# Does nothing, and prints nothing, when all is there. `scripts/setup.sh lint` adds what `make lint` needs.
set -eu
missing=
has_file() { # the header, wherever this machine's compiler looks for it
    echo "#include <$1>" | ${CC:-cc} ${2:-} -E -x c - > /dev/null 2>&1
}
has_library() {
    echo 'int main(void) { return 0; }' | ${CC:-cc} -x c - -o /dev/null "-l$1"
}
need() { # test command, Debian package
    if ! eval "$1" > /dev/null 2>&1; then missing="$missing $2"; fi
}
need 'command -v cc || command -v gcc' gcc
need 'command -v g++' g++ # the CUDA program in the tests, by the emulator
need 'command -v make' make
need 'has_file stdio.h' libc6-dev
need 'has_file dnnl.h' libdnnl-dev
need 'has_library openblas' libopenblas-dev
need 'has_file jansson.h' libjansson-dev
need 'has_file pcre2.h -DPCRE2_CODE_UNIT_WIDTH=8' libpcre2-dev
need 'has_file zmq.h' libzmq3-dev
need 'command -v gnuplot' gnuplot-nox
need '[ -r /usr/share/wordnet/data.noun ]' wordnet-base
if [ "${1:-}" = lint ]; then
    need 'command -v clang-format' clang-format
    need 'command -v cppcheck' cppcheck
fi
[ -n "$missing" ] || exit 0

if ! command -v apt-get > /dev/null; then
    cat >&2 <<TEXT
setup: this system has no apt-get. Please install what these Debian packages hold, then try again:
 $missing
(a C and a C++ compiler with OpenMP, make, oneDNN with headers, OpenBLAS, jansson, PCRE2 and ZeroMQ with headers, gnuplot; WordNet's data files under
/usr/share/wordnet are for the demo only)
TEXT
    exit 1
fi
as_root=
if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo > /dev/null; then
        echo "setup: missing:$missing; run as root: apt-get install$missing" >&2
        exit 1
    fi
    as_root=sudo
fi
echo "setup: installing$missing"
$as_root apt-get update -q > /dev/null
# shellcheck disable=SC2086  # a list of packages
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing > /dev/null
