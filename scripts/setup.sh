# shellcheck shell=bash
# Sourced by its neighbours. `setup_venv [extra]` makes .venv in the checkout, or finds it as it should be.

root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
python=$root/.venv/bin/python
torch=torch==2.13.0

say() { printf '== %s\n' "$*" >&2; }

setup_venv() {
    local extra=${1:-}
    [[ "$(fingerprint)" == "$(cat "$root/.venv/stamp-$extra" 2>/dev/null)" ]] && return
    rm -f "$root/.venv/stamp-"*
    "$python" -m pip --version &>/dev/null || make_venv
    if [[ $("$python" -m pip list --format=freeze) != *"$torch"* ]]; then
        announce_torch
        install "$torch"
    fi
    say "installing realtime${extra:+[$extra]} and what else it needs"
    install --quiet -e ".${extra:+[$extra]}"
    fingerprint | tee "$root/.venv/stamp-" >"$root/.venv/stamp-$extra"
}

# What a finished set-up depends on; the path is part of it, since a venv can't be moved.
fingerprint() {
    echo "$root $torch $("$python" --version 2>&1)"
    sha256sum <"$root/pyproject.toml"
}

make_venv() {
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        say "needs Python 3.11 or newer as python3: sudo apt install python3 python3-venv"
        exit 1
    fi
    if ! python3 -c 'import ensurepip' 2>/dev/null && [[ $EUID == 0 && -e /etc/debian_version ]]; then
        say "installing python3-venv"
        apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null
    fi
    if ! python3 -c 'import ensurepip' 2>/dev/null; then
        say "needs Python's venv: sudo apt install python3-venv"
        exit 1
    fi
    say "creating $root/.venv"
    python3 -m venv --clear "$root/.venv"
}

need_chromium() {
    [[ -x /usr/bin/chromium ]] && return
    if [[ $EUID == 0 && -e /etc/debian_version ]]; then
        say "installing chromium, in which the page is tested"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null
    else
        say "the page is tested in a browser, which is missing, so that is skipped: sudo apt install chromium"
    fi
}

# The index pages name the builds, so nothing is downloaded to tell which one pip will take.
announce_torch() {
    local builds build
    builds=$("$python" -m pip index versions torch 2>/dev/null | sed -n 's/^Available versions: //p' || true)
    build=$(grep -oE "\b${torch#torch==}(\+[a-z0-9.]+)?" <<<"$builds" | head -n 1 || true)
    case $build in
        *+cpu) say "torch $build, the CPU build: about 0.2 GB to download, 1 GB on disk" ;;
        *)
            say "torch ${build:-${torch#torch==}}, most likely with CUDA: about 3 GB to download, 6 GB on disk."
            say "The CPU build is a tenth of that: stop now (Ctrl-C), set PIP_INDEX_URL or PIP_EXTRA_INDEX_URL to"
            say "an index of CPU builds (or PIP_FIND_LINKS to a folder that holds one) and start again."
            ;;
    esac
}

install() { (cd "$root" && "$python" -m pip install --disable-pip-version-check "$@"); }
