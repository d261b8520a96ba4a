#!/usr/bin/env bash
# Opens exactly the ports of docs/deploy/ray.md: between the machines, and the front ends to clients.
#
#   firewall.sh aws VPC_ID CLIENTS     makes a security group and prints its id, for aws.yaml
#   firewall.sh gcp NETWORK CLIENTS    makes rules for machines that have the tag `baton`, as in gcp.yaml
#   firewall.sh nft MACHINES CLIENTS   prints rules for nftables: on each machine, `nft -f FILE`
#
# CLIENTS, MACHINES: networks like 10.0.0.0/8. DRY_RUN=1 prints the commands instead of running them.
# SSH is open between the machines, and to them from where CLIENTS are.
set -euo pipefail

ray="6379-6384 20000-20999 52365"   # deploy/ray/*.yaml
baton="21000-21999"                 # network.worker_ports
nccl="32768-60999"                  # the kernel's (net.ipv4.ip_local_port_range): NCCL chooses there
front="8000 9000"                   # network.http_port, network.grpc_port
between="22 $ray $baton $nccl"

run() { if [ -n "${DRY_RUN:-}" ]; then echo "$@"; else "$@"; fi; }
usage() { sed -n '2,10p' "$0" >&2; exit 2; }
[ $# -eq 3 ] || usage

case $1 in
  aws)
    group=$(run aws ec2 create-security-group --group-name baton --description "Baton" --vpc-id "$2" \
      --query GroupId --output text)
    [ -z "${DRY_RUN:-}" ] || { echo "$group"; group=GROUP; }
    for ports in $between; do
      run aws ec2 authorize-security-group-ingress --group-id "$group" --protocol tcp \
        --port "$ports" --source-group "$group" > /dev/stderr
    done
    # EFA packets have no ports: with EFA=1 everything passes between the machines.
    [ -z "${EFA:-}" ] || run aws ec2 authorize-security-group-ingress --group-id "$group" \
      --protocol all --source-group "$group" > /dev/stderr
    [ -z "${EFA:-}" ] || run aws ec2 authorize-security-group-egress --group-id "$group" \
      --protocol all --source-group "$group" > /dev/stderr
    for port in 22 $front; do
      run aws ec2 authorize-security-group-ingress --group-id "$group" --protocol tcp \
        --port "$port" --cidr "$3" > /dev/stderr
    done
    echo "$group" ;;
  gcp)
    list() { local all; all=$(printf 'tcp:%s,' "$@"); echo "${all%,}"; }
    # shellcheck disable=SC2086 # lists of ports
    run gcloud compute firewall-rules create baton-between --network "$2" \
      --allow "$(list $between)" --source-tags baton --target-tags baton
    # shellcheck disable=SC2086
    run gcloud compute firewall-rules create baton-clients --network "$2" \
      --allow "$(list 22 $front)" --source-ranges "$3" --target-tags baton ;;
  nft)
    list() { local all; all=$(printf '%s, ' "$@"); echo "${all%, }"; }
    # shellcheck disable=SC2086
    cat <<RULES
table inet baton {
  chain input {
    type filter hook input priority 0; policy accept;
    iif lo accept
    ct state established,related accept
    ip saddr $2 tcp dport { $(list $between) } accept
    ip saddr $3 tcp dport { $(list $front) } accept
    tcp dport { $(list $ray $baton $nccl $front) } drop
  }
}
RULES
    ;;
  *) usage ;;
esac
