# Set-up for ./demo and ./test on a bare Debian 12 or Ubuntu 24.04. Sourced by them, in the root of the project.
#
#   require_packages demo|test     installs what is missing, after saying what; prints nothing when all is there
#   want_packages NAME...          installs what is missing of these; what cannot be had is left out, with a line
#   page_packages                  the names of what the server's chat page is made with, for want_packages
#   require_build TARGET [-D...]   configures build/ when needed, then builds TARGET. The options hold for a new build/;
#                                  in an old one they turn on what was off, never off what was on
#   has_nvcc                       is a CUDA compiler there, on PATH or in /usr/local/cuda?
#   has_gpu                        does a GPU answer?
#   note TEXT, fail TEXT           a line for the user, on stderr; fail also ends the script

note() { printf 'beryl: %s\n' "$*" >&2; }
fail() { note "$@"; exit 1; }

# One line a need: the Debian package, and how to see that it is there. Tools count wherever they come from;
# libraries are looked up as packages.
packages_missing() {
  local missing=() package probe
  while read -r package probe; do
    case $probe in
      command:*) command -v "${probe#command:}" > /dev/null ;;
      python:*) python3 -c "import ${probe#python:}" 2> /dev/null ;;
      file:*) [ -e "${probe#file:}" ] ;;
      package) dpkg-query -W -f '${db:Status-Status}\n' "$package" 2> /dev/null | grep -qx installed ;;
    esac || missing+=("$package")
  done
  echo "${missing[*]}"
}

needs_of() {
  cat << 'END'
g++ command:g++
cmake command:cmake
ninja-build command:ninja
pkg-config command:pkg-config
libfmt-dev package
nlohmann-json3-dev package
libcli11-dev package
libpcre2-dev package
libcurl4-openssl-dev package
libssl-dev package
libhwy-dev package
libmicrohttpd-dev package
libedit-dev package
python3 command:python3
python3-pip python:pip
ca-certificates file:/etc/ssl/certs/ca-certificates.crt
END
  if [ "$1" = test ]; then
    cat << 'END'
libgtest-dev package
python3-venv python:ensurepip
END
  fi
}

page_packages() { echo libjs-markdown-it node-dompurify; }

want_packages() {
  local missing=() as_root=() package
  command -v dpkg-query > /dev/null && command -v apt-get > /dev/null || return 0
  for package in "$@"; do
    [ -z "$(echo "$package package" | packages_missing)" ] || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" != 0 ]; then as_root=(sudo -n); fi
  note "installing the packages that are missing: ${missing[*]}"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
    -o DPkg::Lock::Timeout=300 "${missing[@]}" > /dev/null 2>&1 < /dev/null ||
    note "they could not be installed: what needs them is left out"
}

require_packages() {
  local missing as_root=() log
  if ! command -v dpkg-query > /dev/null || ! command -v apt-get > /dev/null; then
    note "no apt here, so nothing is installed; needed, by Debian's names: $(needs_of "$1" | cut -d' ' -f1 | xargs)"
    return
  fi
  missing=$(needs_of "$1" | packages_missing)
  [ -n "$missing" ] || return 0
  if [ "$(id -u)" != 0 ]; then
    command -v sudo > /dev/null || fail "packages are missing; as root, run: apt-get install $missing"
    as_root=(sudo)
  fi
  note "installing the packages that are missing: $missing"
  log=$(mktemp)
  # shellcheck disable=SC2086  # $missing is a list of words
  if ! { "${as_root[@]}" apt-get update -q && "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -q -y --no-install-recommends -o DPkg::Lock::Timeout=300 $missing; } > "$log" 2>&1 < /dev/null; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    fail "the packages could not be installed; as root, run: apt-get update && apt-get install $missing"
  fi
  rm -f "$log"
}

has_nvcc() {
  if ! command -v nvcc > /dev/null && [ -x /usr/local/cuda/bin/nvcc ]; then
    export PATH="/usr/local/cuda/bin:$PATH"
  fi
  command -v nvcc > /dev/null
}

has_gpu() { nvidia-smi -L > /dev/null 2>&1; }

cached() { sed -n "s/^$1:[A-Z]*=//p" build/CMakeCache.txt; }

require_build() {
  local target=$1 option name turned_on=()
  shift
  if [ ! -f build/build.ninja ]; then
    note "configuring build/"
    configure "$@"
  elif [ "$(cached CMAKE_HOME_DIRECTORY)" != "$PWD" ]; then
    note "configuring build/ anew: it was made for another folder"
    configure --fresh "$@"
  else
    for option in "$@"; do
      name=${option#-D}
      if [ "${name#*=}" = ON ] && [ "$(cached "${name%%=*}")" != ON ]; then turned_on+=("$option"); fi
    done
    [ ${#turned_on[@]} = 0 ] || configure "${turned_on[@]}"
  fi
  ninja -C build "$target" 2>&1 | show_build >&2 || fail "the build failed, see above"
}

# Of ninja's output: how far it is, on a terminal; what compilers say; nothing when there is nothing to do.
show_build() {
  local line is_building= clear=
  while IFS= read -r line; do
    case $line in
      'ninja: Entering'* | 'ninja: no work'* | *'Re-checking globbed'* | *'Re-running CMake'*) ;;
      '-- '* | $'\e[0m-- '*) ;;                             # cmake's, when it runs again
      'ptxas info '*) ;;                                    # of what unoptimized GPU code loses
      '['*/*']'*)
        [ -n "$is_building" ] || note "building, some minutes the first time"
        is_building=yes
        if [ -t 2 ]; then
          clear=$'\r\e[K'
          printf '%s%s]' "$clear" "${line%%]*}"
        fi ;;
      *) printf '%s%s\n' "$clear" "$line" ;;
    esac
  done
  printf '%s' "$clear"
}

# cmake's words are shown only when it fails: what matters of them the demo and the test say themselves.
configure() {
  mkdir -p build
  cmake -G Ninja -S . -B build -DCMAKE_BUILD_TYPE=Release "$@" > build/configure.log 2>&1 && return
  cat build/configure.log >&2
  fail "cmake could not configure build/, see above"
}
