#!/usr/bin/env bash
# Builds the two base images of the Containerfile from Debian packages, if no image can be pulled.
# Requires root, mmdebstrap and buildah. Usage: ops/deploy/debian_bases.sh bookworm
set -euo pipefail
release=${1:?give a release of Debian, such as bookworm}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

base() { # NAME PACKAGES
  mmdebstrap --quiet --variant=minbase --include="$2" "$release" "$folder/$1.tar"
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$folder/$1.tar" / >/dev/null
  buildah commit --quiet "$container" "localhost/$1" >/dev/null
  buildah rm "$container" >/dev/null
}

base triolet-builder python3,python3-venv,python3-dev,gcc,libc6-dev,ca-certificates
base triolet-runtime python3,ca-certificates
