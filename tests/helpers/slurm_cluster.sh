#!/usr/bin/env bash
# A Slurm cluster on this machine alone: munged, slurmctld and two slurmd, n1 and n2, of four CPUs each, with a partition
# `main` and one `urgent`, whose jobs have those of the other end after a grace of 60 s. It needs no containers.
#
#   slurm_cluster.sh install          installs Debian's packages
#   slurm_cluster.sh start FOLDER     makes FOLDER/slurm.conf and starts it; commands find it by SLURM_CONF
#   slurm_cluster.sh stop FOLDER
set -euo pipefail

control() { slurmctld -f "$1/slurm.conf"; }
node() { slurmd -f "$1/slurm.conf" -N "$2"; }

configure() { # folder
  local folder=$1 host ports user
  host=$(hostname -s) user=$(id -un)
  mapfile -t ports < <(python3 -c '
import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(each.getsockname()[1] for each in held), sep="\n")')
  cat > "$folder/slurm.conf" << END
ClusterName=trivettest
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
SlurmUser=$user
SlurmdUser=$user
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=4
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=4
PartitionName=main Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
END
}

start() { # folder
  local folder=$1
  install -d -m 755 "$folder"/{state,spool-n1,spool-n2}
  head -c 1024 /dev/urandom > "$folder/munge.key"
  chmod 400 "$folder/munge.key"
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
  configure "$folder"
  control "$folder"
  node "$folder" n1
  node "$folder" n2
  for _ in $(seq 100); do
    [ "$(SLURM_CONF=$folder/slurm.conf sinfo --noheader --partition=main --states=idle --format=%D 2> /dev/null)" = 2 ] && return
    sleep 0.2
  done
  tail "$folder"/*.log >&2
  return 1
}

stop() { # folder
  local file
  SLURM_CONF=$1/slurm.conf timeout 20 scancel --me 2> /dev/null || true
  for file in "$1"/slurmd-*.pid "$1/slurmctld.pid" "$1/munged.pid"; do
    [ ! -e "$file" ] || kill "$(cat "$file")" 2> /dev/null || true
  done
}

case ${1:-} in
  install) apt-get install --yes --no-install-recommends munge slurm-client slurm-wlm-basic-plugins slurmctld slurmd ;;
  start | stop | control) "$1" "$2" ;;
  node) node "$2" "$3" ;;
  *) sed -n '2,7s/^# \?//p' "$0" && exit 2 ;;
esac
