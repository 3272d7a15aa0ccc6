#!/usr/bin/env bash
# usage: bash tools/mpirun_example.sh PROCS CONFIG [key=value ...]      copy and adapt
#
# One rank a process; each reads its number from mpirun (Open MPI, MPICH, Intel MPI), no other setting is needed on one
# machine. On several all ranks have to know one address of the machine of rank 0:
#   Open MPI:  mpirun -np 16 --hostfile hosts -x ADDR=node1 libai train CONFIG
#   MPICH:     mpirun -n 16 -f hosts -genv ADDR node1 libai train CONFIG
set -euo pipefail
if [ $# -lt 2 ]; then sed -n '2s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; fi
processes=$1; shift
exec mpirun -n "$processes" libai train "$@"
