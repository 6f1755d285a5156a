// Package listen holds what every listener of the tunnel needs, for any protocol.
//
//	strangers := listen.NewStrangers(1024, 128)
//	s, full := strangers.Admit(conn, func() { conn.Close() })
//	if s == nil {
//		conn.Close() // full says which limit was reached
//	}
//	defer s.Release()
//
// [Strangers] bounds the connections of peers that have not authenticated yet. [Listener] accepts
// TCP connections, and bounds those of peers that have not authenticated yet.
//
// accept(2) also reports errors of the connection that it would have returned, for instance a route
// that was lost during the handshake. net/http and grpc-go stop serving at most of these errors.
// [Steady] keeps such a listener accepting. [Transient] is for packages with an accept loop of
// their own.
package listen
