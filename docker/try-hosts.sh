#!/usr/bin/env bash
# Tries two hosts in two network namespaces of this machine, which share a folder and nothing else: broker with TLS, API
# and a worker in one, `trivet worker --join` in the other. A gang runs over both, is cut off under way, and ends once the
# link is there again. Needs root, iproute2, openssl, curl, and trivet in .venv; leaves nothing behind.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=$PWD/.venv/bin
FOLDER=$(mktemp -d)
A=10.77.0.1 B=10.77.0.2
FAILED=0

finish() {
  [ "$1$FAILED" = 00 ] || tail -n 15 "$FOLDER"/*.log
  for name in trivet-a trivet-b; do
    ip netns pids $name 2> /dev/null | xargs -r kill 2> /dev/null || true
  done
  sleep 3
  for name in trivet-a trivet-b; do
    ip netns pids $name 2> /dev/null | xargs -r kill -9 2> /dev/null || true
    ip netns del $name 2> /dev/null || true
  done
  rm -rf "$FOLDER"
}
trap 'finish $?' EXIT

on() { # host, command: with settings of that host alone
  local host=$1
  shift
  ip netns exec "trivet-$host" env -i PATH="$BIN:$PATH" HOME="$FOLDER/$host" OMP_NUM_THREADS=1 TRIVET_CPU_SLOTS=2 \
    TRIVET_DATA="${DATA:-$FOLDER/data}" TRIVET_STOP_JOBS=true "$@"
}
shown() { printf '  %-58s %s\n' "$1" "$2"; }
check() { if [ "$2" = "$3" ]; then shown "$1" "$3"; else shown "$1" "$3, NOT $2"; FAILED=1; fi; }
json() { python3 -c "import json,sys; value=json.load(sys.stdin); print($1)"; }
call() { on a curl --silent --show-error --max-time 30 -H "Authorization: Bearer $KEY" "$@"; }
field() { call "http://127.0.0.1:8437/v1/jobs/$1" | json "value.get('$2')"; }
alive() { call http://127.0.0.1:8437/v1/hosts | json "' '.join(sorted(h['name'] + '=' + h['address'] for h in value['items'] if h['alive']))"; }
wait_for() { for _ in $(seq 300); do [ "$("${@:2}")" = "$1" ] && return; sleep 1; done; return 1; }
ranks() { # host
  local pid
  for pid in $(ip netns pids "trivet-$1"); do tr '\0' '\n' < "/proc/$pid/environ" 2> /dev/null | grep -x "TRIVET_JOB=$JOB" || true; done | wc -l
}
refused() { # what, expected words, command
  local said code=0
  said=$("${@:3}" 2>&1) || code=$?
  said=$(printf '%s' "$said" | tr -s '\n ' ' ')
  check "$1: exit code" 2 "$code"
  if [[ $said == *"$2"* ]]; then shown "  it says" "… ${said:0:300}"; else shown "  it says" "$said, NOT $2"; FAILED=1; fi
}

mkdir -p "$FOLDER"/{a,b,broker,data,tls,other}
ip netns add trivet-a && ip netns add trivet-b
ip -n trivet-a link add link0 type veth peer name link0 netns trivet-b
ip -n trivet-a addr add $A/24 dev link0 && ip -n trivet-b addr add $B/24 dev link0
for name in trivet-a trivet-b; do ip -n $name link set lo up && ip -n $name link set link0 up; done

(cd "$FOLDER/tls" && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj "/CN=broker" \
  -addext "subjectAltName=IP:$A" -keyout broker.key -out broker.pem 2> /dev/null)
on a trivet broker acl "$FOLDER/passwords" --add api --add host-a --add host-b --output "$FOLDER/users.acl" > /dev/null
SERVER=$("$BIN/python" -c 'from service.jobs.host.embedded_broker import find_server; print(find_server())')
on a "$SERVER" --port 6380 --bind 127.0.0.1 --aclfile "$FOLDER/users.acl" --dir "$FOLDER/broker" \
  --appendonly yes --appendfsync always > "$FOLDER/broker.log" 2>&1 &
# The broker of the package is built without TLS: this ends it in front of it.
on a "$BIN/python" - "$A" "$FOLDER/tls" > "$FOLDER/front.log" 2>&1 << 'END' &
import asyncio, ssl, sys

async def pipe(reader, writer):
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()

async def serve(reader, writer):
    inner = await asyncio.open_connection("127.0.0.1", 6380)
    await asyncio.gather(pipe(reader, inner[1]), pipe(inner[0], writer))

async def main():
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(f"{sys.argv[2]}/broker.pem", f"{sys.argv[2]}/broker.key")
    await (await asyncio.start_server(serve, sys.argv[1], 6379, ssl=context)).serve_forever()

asyncio.run(main())
END
URL=rediss://$A:6379/0
sleep 2
on a env TRIVET_REDIS_URL=$URL TRIVET_BROKER_CA_CERT="$FOLDER/tls/broker.pem" TRIVET_BROKER_USER=api \
  TRIVET_BROKER_PASSWORD_FILE="$FOLDER/passwords/api" trivet api > "$FOLDER/api.log" 2>&1 &
for _ in $(seq 300); do [ -e "$FOLDER/data/admin.key" ] && break; sleep 1; done
KEY=$(cat "$FOLDER/data/admin.key")
for host in a b; do
  on a trivet broker invite "$FOLDER/passwords" host-$host $URL --ca-cert "$FOLDER/tls/broker.pem" > "$FOLDER/$host.invitation"
done

echo "Joining"
on a trivet worker --join "$FOLDER/a.invitation" > "$FOLDER/worker-a.log" 2>&1 &
wait_for "a=$A" alive || true
DATA=$FOLDER/other refused "another data folder" "Mount the folder" on b trivet worker --join "$FOLDER/b.invitation"
refused "half an invitation" "not an invitation" on b trivet worker --join "$(cut -c 9- "$FOLDER/b.invitation")"
refused "loopback as address" "Leave it out for $B" on b env TRIVET_WORKER_ADDRESS=127.0.0.1 trivet worker --join "$FOLDER/b.invitation"
refused "the other's name" "TRIVET_WORKER_NAME" on b env TRIVET_WORKER_NAME=a trivet worker --join "$FOLDER/b.invitation"
ip -n trivet-b link set link0 down
refused "no way to the broker" "open its port" on b trivet worker --join "$FOLDER/b.invitation"
ip -n trivet-b link set link0 up
on b trivet worker --join "$FOLDER/b.invitation" > "$FOLDER/worker-b.log" 2>&1 &
wait_for "a=$A b=$B" alive || true
check "hosts" "a=$A b=$B" "$(alive)"
shown "host b says" "$(grep -h ' joins ' "$FOLDER/worker-b.log" | sed 's/.*INFO //' | sed "s#$FOLDER#…#")"
check "passwords in command lines" 0 "$(ps -eo args | grep -v grep | grep -c -F -f "$FOLDER/passwords/host-a" -f "$FOLDER/passwords/host-b" || true)"

echo "A gang of four ranks over both"
SPEC='{"kind": "train", "model": {"family": "mlp", "in_features": 64, "hidden": [64], "out_features": 10}, "data": {"source": "digits"},
  "steps": 1500, "batch": {"global": 64}, "parallel": {"dp_shard": 4}, "max_hosts": 2, "checkpoint": {"every": 100}}'
JOB=$(call --fail-with-body --json "$SPEC" http://127.0.0.1:8437/v1/jobs | json "value['id']")
for _ in $(seq 200); do call "http://127.0.0.1:8437/v1/jobs/$JOB/events?types=metric&limit=1" | grep -q '"step"' && break; sleep 1; done
check "it runs" running "$(field "$JOB" state)"
ip -n trivet-b link set link0 down
shown "cut off" "host b"
wait_for "a=$A" alive || true
wait_for queued field "$JOB" state || true
check "the job, given back" queued "$(field "$JOB" state)"
sleep 5
check "ranks left on host a, on host b" "0 0" "$(ranks a) $(ranks b)"
ip -n trivet-b link set link0 up
wait_for "a=$A b=$B" alive || true
check "healed: hosts" "a=$A b=$B" "$(alive)"
wait_for succeeded field "$JOB" state || true
check "the job" succeeded "$(field "$JOB" state)"
shown "attempts" "$(field "$JOB" attempt)"
exit "$FAILED"
