#!/usr/bin/env bash
# A Docker Engine with compose, and base images, on a bare Debian machine as root; nothing is done
# that is there already. Where no image registry answers, the base images are made of packages.
#   deploy/docker/engine.sh ensure   prints variables for docker-compose.yml
#   deploy/docker/engine.sh stop     ends the engine, if `ensure` started it
#   deploy/docker/engine.sh able     fails, and says why, where no engine runs and the kernel allows none
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
STATE=${XDG_RUNTIME_DIR:-/run}/baton-docker
PYTHON_IMAGE=python:3.11.13-slim-bookworm REDIS_IMAGE=redis:7.4.2-bookworm

say() { echo "engine.sh: $*" >&2; }

# Compose, buildx and an engine that knows start intervals are in trixie, not in bookworm.
install_engine() {
  docker compose version && docker buildx version && command -v dockerd && return
  say "installing docker from Debian packages"
  local dir options
  dir=$(mktemp -d)
  chmod 755 "$dir"
  mkdir -p "$dir/parts" "$dir/lists/partial"
  cp /etc/apt/sources.list.d/debian.sources "$dir/parts/"
  sed -n '1,/^$/p' /etc/apt/sources.list.d/debian.sources |
    sed 's/^Suites:.*/Suites: trixie/' > "$dir/parts/trixie.sources"
  printf '%s\n' 'Package: *' 'Pin: release n=trixie' 'Pin-Priority: -1' '' \
    'Package: docker.io docker-cli docker-compose docker-buildx containerd' \
    'Pin: release n=trixie' 'Pin-Priority: 990' > "$dir/preferences"
  options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$dir/parts"
    -o "Dir::Etc::preferences=$dir/preferences" -o "Dir::State::lists=$dir/lists")
  apt-get "${options[@]}" update
  apt-get "${options[@]}" install -y --no-install-recommends \
    docker.io docker-cli docker-compose docker-buildx iptables
  rm -rf "$dir"
}

start_engine() {
  docker info && return
  say "starting dockerd, its log is $STATE/log"
  mkdir -p "$STATE"
  # Left by an engine that was killed; containers without an init never reap it.
  rm -f /var/run/docker.pid /var/run/docker/containerd/containerd.pid
  setsid dockerd < /dev/null > "$STATE/log" 2>&1 &
  echo $! > "$STATE/pid"
  timeout 60 sh -c "until docker info; do kill -0 $! || exit 1; sleep 0.2; done" && return
  say "dockerd does not start; the end of its log:"
  tail -20 "$STATE/log" >&2
  return 1
}

base_images() {
  docker image inspect "$PYTHON_IMAGE" "$REDIS_IMAGE" && return
  timeout 120 docker pull -q "$PYTHON_IMAGE" && timeout 120 docker pull -q "$REDIS_IMAGE" && return
  say "no registry: making base images of Debian packages"
  PYTHON_IMAGE=baton-base/python:3.11 REDIS_IMAGE=baton-base/redis:7
  docker image inspect "$PYTHON_IMAGE" "$REDIS_IMAGE" && return
  command -v mmdebstrap || apt-get install -qqy --no-install-recommends mmdebstrap
  debian_with_python | docker import - "$PYTHON_IMAGE"
  docker build -q -t "$REDIS_IMAGE" - <<< "FROM $PYTHON_IMAGE
RUN apt-get update -q && apt-get install -yq --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*"
}

# A root file system as a tar, which trusts the certificates that this machine trusts.
debian_with_python() {
  TMPDIR=$(findmnt -no TARGET /dev/shm || echo /tmp) mmdebstrap --quiet --variant=minbase \
    --include=ca-certificates,python3,python3-venv --aptopt='Acquire::Languages "none"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt=force-unsafe-io \
    --customize-hook='cp /usr/local/share/ca-certificates/*.crt "$1/usr/local/share/ca-certificates/" || true' \
    --customize-hook='chroot "$1" update-ca-certificates' \
    --customize-hook='printf "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n" > "$1/etc/pip.conf"' \
    --customize-hook='printf "#!/bin/sh\nexit 101\n" > "$1/usr/sbin/policy-rc.d"; chmod 755 "$1/usr/sbin/policy-rc.d"' \
    --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*' \
    bookworm - /etc/apt/sources.list.d/debian.sources
}

# What an engine cannot do without and only the kernel can give.
able() {
  docker info > /dev/null 2>&1 && return
  [ "$(id -u)" = 0 ] || { say "no engine runs, and to start one takes root"; return 1; }
  local refused
  refused=$(unshare --mount --uts --ipc --net --pid --fork \
    sh -c 'mount -t tmpfs none /mnt && mount -t proc proc /proc' 2>&1) ||
    { say "this kernel lets root have no namespaces of its own: $refused"; return 1; }
  grep -q cgroup /proc/filesystems || { say "this kernel has no control groups"; return 1; }
}

stop_engine() {
  [ -e "$STATE/pid" ] || return 0
  local pid
  pid=$(cat "$STATE/pid")
  kill "$pid" || true
  timeout 60 sh -c 'while [ -e /var/run/docker.pid ]; do sleep 0.2; done'
  rm -rf "$STATE"
}

case ${1:-} in
  ensure)
    { install_engine; start_engine; base_images; } > /dev/null
    printf 'BASE_IMAGE=%s\nREDIS_IMAGE=%s\n' "$PYTHON_IMAGE" "$REDIS_IMAGE"
    ;;
  stop) stop_engine > /dev/null ;;
  able) able ;;
  *) say "use: ensure, stop or able"; exit 2 ;;
esac
