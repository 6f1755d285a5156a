// Package listen holds what every listener of the tunnel needs, for any protocol.
//
//	strangers := listen.NewStrangers(1024, 128)
//	s, full := strangers.Admit(conn, func() { conn.Close() })
//	if s == nil {
//		conn.Close() // full says which limit was reached
//	}
//	defer s.Release()
//
// [Strangers] limits the connections of peers that have not authenticated yet. [Listener] accepts
// TCP connections, and limits strangers by Strangers.
//
// accept(2) also reports errors of the connection that it would have returned, for instance a route
// that was lost during the handshake. After most of these errors, net/http and grpc-go stop serving.
// A listener in [Steady] hides such errors from them. A package with an accept loop of its own asks
// [Transient] whether to continue.
package listen
