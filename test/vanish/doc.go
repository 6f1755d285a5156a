// Package vanish proves that the tunnel never turns a cut-off stream into a complete
// one. A caller's machine, or a target's, vanishes in the middle of a conn: its link goes
// down, and the kernel at the other end gets neither a FIN nor a reset from it.
//
//	make vanish   every state by every way, at least 200 streams (three minutes)
//
// Without TUNNEL_VANISH=1 two conns of each state vanish once (half a minute).
//
// A test has two networks. The cloud, its replicas, the edge and one end of each conn are
// inside. The other end of each conn is outside, and vanishes. The kernel inside gives up
// on a vanished peer within seconds, because the test lowers net.ipv4.tcp_retries2 and
// the keepalive times of the sockets that lead outside.
//
// The way "reach" leads through two edges, and each has its own rules for Services in its
// kernel. So there is a third network, with one of the edges and the end that stays.
//
// A stream that never ended at its source must end with an error at its reader. Linux
// reports a reset once per socket, to a read or to a write. So a conn whose end is judged
// either has nobody writing at that moment, or its writer's error counts as well.
//
// Where things are: network_test.go makes the networks and cuts the link; tunnel_test.go
// starts the processes and opens conns; reach_test.go adds what the way "reach" needs;
// states_test.go is what a conn does when its peer vanishes, and how its end is judged.
package vanish
