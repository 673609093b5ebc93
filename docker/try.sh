#!/usr/bin/env bash
# Builds the images and tries the deployment of docker-compose.yml, as a project of its own beside any that runs here:
# it is started twice, runs a job of each kind over the published port, loses each container under a running job, runs a
# gang over two workers, and is restored from a backup. It ends with what was lost, which must be nothing, and leaves
# neither containers nor volumes. Needs Docker with BuildKit, Compose, curl and python3; where no registry of images is
# reached, Debian's mirror and root too (docker/bases.sh).
#
#   TORCH_INDEX   PyTorch's index of CPU wheels, where docker/wheels has none
#   --no-build    takes the images that there are
#   --cuda        tries the worker's image for CUDA and nothing else: it is built and started, and where Docker has NVIDIA's
#                 container toolkit, a job runs on a GPU. Where there is no engine, docker/plain.py runs the same lines
set -euo pipefail
cd "$(dirname "$0")/.."

FOLDER=$(mktemp -d)
export COMPOSE_PROJECT_NAME=trivet-try TRIVET_SECRETS=$FOLDER TRIVET_PORT=18437 TRIVET_CPU_SLOTS=2
export TRIVET_SUBNET=172.30.85.0/24 TRIVET_GATEWAY=172.30.85.1 DOCKER_BUILDKIT=1
URL=http://127.0.0.1:$TRIVET_PORT
FAILED=0

finish() {
  [ "$1$FAILED" = 00 ] || docker compose logs --tail 30 || true
  docker compose down --volumes --timeout 5 > /dev/null 2>&1 || true
  rm -rf "$FOLDER"
}
trap 'finish $?' EXIT

say() { printf '%s\n' "$*"; }
shown() { printf '  %-66s %s\n' "$1" "$2"; }
check() { # what, expected, found
  if [ "$2" = "$3" ]; then shown "$1" "$3"; else shown "$1" "$3, NOT $2"; FAILED=1; fi
}
json() { python3 -c "import json,sys; value=json.load(sys.stdin); print($1)"; }
call() { curl --silent --max-time 30 --retry 120 --retry-all-errors --retry-delay 1 -H "Authorization: Bearer $KEY" "$@"; }
submit() { call --fail-with-body --json "$1" "$URL/v1/jobs" | json "value['id']"; }
state() { call "$URL/v1/jobs/$1" | json "value['state']"; }
up() { docker compose up --detach --wait --quiet-pull "$@" > "$FOLDER/up.log" 2>&1 || { cat "$FOLDER/up.log"; exit 1; }; }
until_state() { # job, pattern
  for _ in $(seq 600); do
    STATE=$(state "$1")
    [[ $STATE =~ ^($2)$ ]] && return
    [[ $STATE =~ ^(failed|cancelled)$ ]] && break
    sleep 1
  done
  call "$URL/v1/jobs/$1" | json "value['state'], value['error'], value['reason']"
  return 1
}
ends() { until_state "$1" succeeded || true; check "$2" succeeded "$STATE"; }
begun() { # job: it has taken a step
  until_state "$1" running
  until call "$URL/v1/jobs/$1/events?types=metric&limit=1" | grep -q '"step"'; do sleep 1; done
}
seconds() { local began=$SECONDS; "$@"; SPENT=$((SECONDS - began)); }

MODEL='{"family": "mlp", "in_features": 64, "hidden": [64, 64], "out_features": 10}'
train() { # name, steps, parallel, more
  printf '{"kind": "train", "name": "%s", "model": %s, "data": {"source": "digits"}, "steps": %s, "batch": {"global": 64}, "parallel": %s, "checkpoint": {"every": 2000}%s}' \
    "$1" "$MODEL" "$2" "$3" "${4:-}"
}

cuda() {
  local image=trivet-worker-cuda:local locked
  docker compose --profile gpu build --quiet worker-gpu
  inside() { docker run --rm --network none --cap-drop ALL --entrypoint "$1" $image "${@:2}"; }
  locked=$(sed -n 's/^torch==\([^ ]*\).*/\1/p' torch-cuda.lock)
  shown $image "$(docker image inspect --format '{{.Size}}' $image | numfmt --to=si) bytes"
  check "its user" trivet "$(docker image inspect --format '{{.Config.User}}' $image)"
  check "its torch" "$locked" "$(inside python -c 'import torch; print(torch.__version__.partition("+")[0])')"
  check "is for CUDA" yes "$(inside python -c 'import torch; print("yes" if torch.version.cuda else "no")')"
  check "a C++ compiler" yes "$(inside sh -c 'g++ --version > /dev/null && echo yes')"
  check "its entry point" yes "$(docker run --rm --network none $image --version > /dev/null && echo yes)"
  if ! docker info --format '{{json .Runtimes}}' | grep -q nvidia; then
    shown "a job on a GPU" "not tried: Docker has no NVIDIA container toolkit"
    return
  fi
  docker compose build --quiet api
  COMPOSE_PROFILES=gpu up --scale worker=0
  KEY=$(docker compose exec -T api cat /private/admin.key)
  ends "$(submit "$(train first 50 '{}')")" "a job on a GPU"
}

say "Images"
[ "${1:-}" = --no-build ] || docker/bases.sh
install -d -m 700 "$FOLDER/broker"
for user in api host; do openssl rand -base64 48 | tr -d '\n' > "$FOLDER/broker/$user"; printf '/#' >> "$FOLDER/broker/$user"; done
echo unused > "$FOLDER/grafana"
chmod 644 "$FOLDER"/broker/* "$FOLDER/grafana"
if [ "${1:-}" = --cuda ]; then
  cuda
  exit "$FAILED"
fi
[ "${1:-}" = --no-build ] || docker compose build --quiet api worker
for name in trivet-api trivet-worker; do
  shown "$name" "$(docker image inspect --format '{{.Size}}' $name:local | numfmt --to=si) bytes, user $(docker image inspect --format '{{.Config.User}}' $name:local)"
done
check "torch in the API's image" no "$(docker run --rm --network none --entrypoint python trivet-api:local -c 'import torch' 2> /dev/null && echo yes || echo no)"

say "Start, twice"
seconds up; shown "healthy after" "$SPENT s"
KEY=$(docker compose exec -T api cat /private/admin.key)
check "the admin key is in the worker" no "$(docker compose exec -T worker sh -c 'find / -xdev -name admin.key 2> /dev/null; find /data -name admin.key' | grep -q . && echo yes || echo no)"
check "passwords in command lines and environments" 0 "$(docker inspect $(docker compose ps -q) | grep -c -F -f "$FOLDER/broker/api" -f "$FOLDER/broker/host" || true)"
FIRST=$(submit "$(train first 50 '{}')")
ends "$FIRST" "a job"
docker compose down --timeout 30 > /dev/null 2>&1
seconds up; shown "healthy again after" "$SPENT s"
check "the job of before" succeeded "$(state "$FIRST")"

say "Behind a proxy"
head_of() { curl --silent --output /dev/null --dump-header - --max-time 10 "$@"; }
check "HSTS where the proxy had TLS" 1 "$(head_of -H 'X-Forwarded-Proto: https' "$URL/healthz" | grep -ci '^strict-transport-security' || true)"
for _ in $(seq 30); do head_of -H 'X-Forwarded-For: 203.0.113.9' -H 'Authorization: Bearer tvt_wrong' "$URL/v1/jobs" > /dev/null; done
check "after 30 wrong keys from one address, a right one from another" 200 "$(head_of -H 'X-Forwarded-For: 203.0.113.10' -H "Authorization: Bearer $KEY" "$URL/v1/jobs" | sed -n '1s/[^ ]* \([0-9]*\).*/\1/p')"

say "A job of each kind"
TRAINED=$(submit "$(train trained 100 '{"tp": 2}')")
ends "$TRAINED" "train, two ranks"
VERIFIED=$(submit "{\"kind\": \"verify\", \"model\": {\"job\": \"$TRAINED\"}, \"property\": {\"robustness\": {\"data\": {\"source\": \"digits\"}, \"count\": 8, \"eps\": 0.01}}, \"method\": \"crown\"}")
ends "$VERIFIED" "verify"
COMPILED=$(submit "{\"kind\": \"compile\", \"model\": {\"job\": \"$TRAINED\"}, \"data\": {\"source\": \"digits\"}, \"modes\": [\"eager\", \"inductor\"], \"phases\": [\"inference\"], \"shapes\": [16], \"steps\": 2}")
ends "$COMPILED" "compile, with the C++ compiler"

say "Each container restarts under a running job"
STEPS=${STEPS:-20000}
LONG=$(submit "$(train long "$STEPS" '{}')")
begun "$LONG"
for each in api broker; do
  docker compose restart --timeout 30 $each > /dev/null 2>&1
  sleep 3
  check "after a restart of $each the job, at its attempt 1" "running 1" "$(call "$URL/v1/jobs/$LONG" | json "value['state'], value['attempt']" | tr -d "(),'")"
done
seconds docker compose stop --timeout 60 worker 2> /dev/null
shown "the worker stopped after" "$SPENT s"
check "the job, without a worker" queued "$(state "$LONG")"
shown "its reason" "$(call "$URL/v1/jobs/$LONG/events?types=state&limit=100" | json "value['items'][-1].get('reason')")"
docker compose start worker > /dev/null 2>&1
begun "$LONG"
docker compose kill worker > /dev/null 2>&1
docker compose up --detach worker > /dev/null 2>&1
until_state "$LONG" 'queued|starting|succeeded'
ends "$LONG" "the job, after its worker was killed as well"
call "$URL/v1/jobs/$LONG" > "$FOLDER/long.json"
shown "attempts" "$(json "value['attempt']" < "$FOLDER/long.json")"

say "Two workers"
up --scale worker=2
check "hosts" 2 "$(call "$URL/v1/hosts" | json "len([host for host in value['items'] if host['alive']])")"
GANG=$(submit "$(train gang 100 '{"dp_shard": 4}' ', "max_hosts": 2')")
ends "$GANG" "a gang of four ranks on two hosts"
shown "placed on" "$(call "$URL/v1/jobs/$GANG" | json "[share['host'] for share in value['placement']]")"
refused() { # what, options
  local said code=0 began=$SECONDS
  said=$(docker compose run --rm --no-deps -T "${@:2}" worker 2>&1 | tail -1; exit "${PIPESTATUS[0]}") || code=$?
  check "$1: exit code" 2 "$code"
  shown "  after $((SECONDS - began)) s:" "${said##* ERROR }"
}
refused "a worker at 127.0.0.1" -e TRIVET_WORKER_ADDRESS=127.0.0.1
refused "a worker with the name of another" -e "TRIVET_WORKER_NAME=$(call "$URL/v1/hosts" | json "value['items'][0]['name']")"

say "Backup and restore"
tarred() { # what tar does
  for volume in broker data private; do
    docker run --rm --user root --network none --volume "${COMPOSE_PROJECT_NAME}_$volume:/from" --volume "$FOLDER:/to" \
      --entrypoint tar trivet-api:local -C /from "$1" "/to/$volume.tar" "${@:2}"
  done
}
docker compose stop --timeout 30 > /dev/null 2>&1
tarred -cf .
docker compose down --volumes > /dev/null 2>&1
docker compose create > /dev/null 2>&1
tarred -xpf
up --scale worker=2
check "the gang's job, by the same key" succeeded "$(state "$GANG")"

say "What was lost"
check "jobs that did not succeed" 0 "$(call "$URL/v1/jobs?limit=100" | json "sum(job['state'] != 'succeeded' for job in value['items'])")"
check "containers that are not healthy" 0 "$(docker compose ps --format '{{.Health}}' | grep -cvx healthy || true)"
[ "$FAILED" = 0 ] && say "nothing"
exit "$FAILED"
