#!/usr/bin/env bash
# Builds etcd, kube-apiserver, kube-controller-manager and kube-scheduler 1.20.2 in FOLDER/bin from
# Debian 12's packages, without installing any of them. Called by `make k8s-test`.
#
#   tests/kubernetes/build_control_plane.sh FOLDER
#
# Takes 6 minutes of two cores, 3 GB of disk while it builds (400 MB afterwards) and 125 MB of
# downloads. Needs apt-get and dpkg (Debian or a relative of it), but no root.
set -euo pipefail

MIRROR=${MIRROR:-http://deb.debian.org/debian}
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
PROGRAMS=(kube-apiserver kube-controller-manager kube-scheduler)

mkdir -p "$1"
FOLDER=$(cd "$1" && pwd)
[ -x "$FOLDER/bin/etcd" ] && exit 0
for needed in apt-get dpkg; do
  command -v $needed >/dev/null || { echo "$0: $needed is missing: this build needs Debian's packages" >&2; exit 2; }
done
[ -f $KEYRING ] || { echo "$0: $KEYRING is missing: install debian-archive-keyring" >&2; exit 2; }

WORK=$FOLDER/work
mkdir -p "$WORK/lists/partial" "$WORK/cache/archives/partial" "$FOLDER/bin"
cd "$WORK"
for kind in deb deb-src; do echo "$kind [signed-by=$KEYRING] $MIRROR bookworm main"; done >sources.list
apt() {
  apt-get -qq -o Dir::Etc::sourcelist="$WORK/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::State::lists="$WORK/lists" -o Dir::Cache="$WORK/cache" -o APT::Sandbox::User=root "$@"
}
echo "Fetching sources and a compiler, 125 MB ..."
apt update
apt source --download-only kubernetes
apt download golang-1.19-go golang-1.19-src etcd-server
for package in *.deb; do dpkg -x "$package" root; done

export GOROOT=$WORK/root/usr/lib/go-1.19 GOPATH=$WORK/gopath GOCACHE=$WORK/gocache
export PATH=$GOROOT/bin:$PATH
# With modules Go would want to write go.mod; vendor/ holds everything.
export GO111MODULE=off GOFLAGS= CGO_ENABLED=0
SOURCE=$GOPATH/src/k8s.io/kubernetes
mkdir -p "$SOURCE"
tar xzf kubernetes_*.orig.tar.gz -C "$SOURCE" --strip-components=1
cd "$SOURCE"

# Debian's tarball lacks the generated OpenAPI definitions, which the API server is compiled with.
echo "Generating the OpenAPI definitions ..."
go build -o "$WORK/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
described=$(grep -rl --include=doc.go '+k8s:openapi-gen=' staging/src/k8s.io pkg cmd | xargs -n1 dirname |
  grep -vE '/examples?/|sample-|code-generator|/testdata|kube-openapi' | sed 's#^staging/src/#vendor/#')
apimachinery=(pkg/version pkg/runtime pkg/util/intstr pkg/api/resource)
client=(pkg/version pkg/apis/clientauthentication/v1beta1 pkg/apis/clientauthentication/v1alpha1)
inputs=$(for folder in $described "${apimachinery[@]/#/vendor/k8s.io/apimachinery/}" "${client[@]/#/vendor/k8s.io/client-go/}"; do
  compgen -G "$folder/*.go" >/dev/null && echo "k8s.io/kubernetes/$folder"
done | sort -u | paste -sd,)
"$WORK/openapi-gen" -O zz_generated.openapi -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt \
  -i "$inputs" -p k8s.io/kubernetes/pkg/generated/openapi -r "$WORK/violations"

for program in "${PROGRAMS[@]}"; do
  echo "Building $program ..."
  go build -ldflags '-s -w' -o "$FOLDER/bin/$program" "./cmd/$program"
done
# Last, because it marks a whole build.
cp "$WORK/root/usr/bin/etcd" "$FOLDER/bin/etcd"
chmod -R u+w "$WORK" && rm -rf "$WORK"
