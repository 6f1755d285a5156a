#!/bin/bash
# net.sh [NODE]: the bridge in the root network namespace, and for each node a namespace (behind NAT: two, its own and its
# router's). With NODE, a new namespace for this node, which is behind NAT.
# teardown removes all of it. Nothing leaves the machine: every range used here has a route to a node or an `unreachable`
# route, and the bridge forwards nothing.
set -euo pipefail
. "$(dirname "$0")/common.sh"
in_ns() { local ns=$1; shift; nsenter --net=/run/netns/"$ns" "$@"; }
forwarding() { in_ns "$1" sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'; }
nowhere() { ip route add unreachable "$1" proto "$ROUTEPROTO"; }

# behind NODE: the node's namespace, and its link to the router of its LAN.
behind() {
  local n=$1 i ns=$PREFIX-$1 s r port=eth0 a6
  i=$(index "$n") s=$(lan "$n") r=$PREFIX-r$(router "$n") a6=$(address6 "$n")
  ip netns add "$ns"
  in_ns "$ns" ip link set lo up
  if [ -z "$ONELAN" ]; then
    in_ns "$r" ip link add lan type veth peer name $port netns "$ns"
    in_ns "$r" ip addr add "$s.1/24" dev lan
    in_ns "$r" ip link set lan up
  else
    in_ns "$r" ip link add "lan$i" type veth peer name $port netns "$ns"
    in_ns "$r" ip link set "lan$i" master lan up
    in_ns "$ns" ip addr add "$a6/64" dev $port nodad
  fi
  in_ns "$ns" ip link set $port address "02:77:00:00:00:$(printf %02x "$i")" # a machine keeps it when it boots
  in_ns "$ns" ip addr add "$(address "$n")/24" dev $port
  in_ns "$ns" ip link set $port up
  in_ns "$ns" ip route add default via "$s.1"
  [ -z "$ONELAN" ] || in_ns "$ns" ip -6 route add default via "$ROUTER6"
  forwarding "$ns"
}

# forget NODE: takes away what behind has made, with all that the node itself has made there: links, rules, routes. The
# kernel keeps the nameless namespace until the last socket of the killed node has timed out.
forget() {
  local port=lan
  [ -z "$ONELAN" ] || port=lan$(index "$1")
  in_ns "$PREFIX-r$(router "$1")" ip link del "$port" # and its other end, in the node
  ip netns del "$PREFIX-$1"
}

if [ $# = 1 ]; then # of a node that is down: as a machine that boots has it
  forget "$1"
  behind "$1"
  exit
fi

ip link add "$BRIDGE" type bridge
ip addr add "$CPIP/24" dev "$BRIDGE"
ip link set "$BRIDGE" up
echo 0 >"/proc/sys/net/ipv4/conf/$BRIDGE/forwarding"
services=10.96.0.0/16
for n in $NODES; do
  i=$(index "$n") ns=$PREFIX-$n port=${PREFIX}v$(index "$n")
  if ! direct "$n"; then
    r=$PREFIX-r$(router "$n") s=$(lan "$n")
    if [ "$(router "$n")" = "$i" ]; then
      ip netns add "$r"
      in_ns "$r" ip link set lo up
      ip link add "$port" type veth peer name eth0 netns "$r"
      ip link set "$port" master "$BRIDGE" up
      in_ns "$r" ip addr add "$NET.$((100 + i))/24" dev eth0
      in_ns "$r" ip link set eth0 up
      if [ -n "$ONELAN" ]; then
        in_ns "$r" ip link add lan type bridge
        in_ns "$r" ip addr add "$s.1/24" dev lan
        in_ns "$r" ip addr add "$ROUTER6/64" dev lan nodad
        in_ns "$r" ip addr add "$OUTSIDE6/128" dev lo nodad
        in_ns "$r" ip link set lan up
      fi
      forwarding "$r"
      # Outwards everything, masqueraded; inwards only answers.
      in_ns "$r" iptables -t nat -A POSTROUTING -o eth0 -j MASQUERADE
      in_ns "$r" iptables -P FORWARD DROP
      in_ns "$r" iptables -A FORWARD -i lan -j ACCEPT
      in_ns "$r" iptables -A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
      nowhere "$s.0/24"
    fi
    behind "$n"
    nowhere "10.88.$i.0/24"
  else
    ip netns add "$ns"
    in_ns "$ns" ip link set lo up
    ip link add "$port" type veth peer name eth0 netns "$ns"
    ip link set "$port" master "$BRIDGE" up
    in_ns "$ns" ip addr add "$(address "$n")/24" dev eth0
    in_ns "$ns" ip link set eth0 up
    in_ns "$ns" ip route add default via "$CPIP"
    ip route add "10.88.$i.0/24" via "$(address "$n")" dev "$BRIDGE" proto "$ROUTEPROTO"
    forwarding "$ns"
  fi
done

# With kube-proxy, the control plane reaches Services: here through the kube-proxy of the first node on the bridge.
for n in $NODES; do
  [ -n "${KUBEPROXY#none}" ] && direct "$n" || continue
  ip route add "$services" via "$(address "$n")" dev "$BRIDGE" proto "$ROUTEPROTO"
  services=
  break
done
[ -z "$services" ] || nowhere "$services"

for n in $NODES; do # pods of one node on the bridge reach pods of another without the root namespace
  for m in $NODES; do
    [ "$n" = "$m" ] || ! direct "$n" || ! direct "$m" || in_ns "$PREFIX-$n" ip route add "10.88.$(index "$m").0/24" via "$(address "$m")"
  done
done
