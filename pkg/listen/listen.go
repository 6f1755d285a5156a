// Package listen holds what every listener of ours needs, whatever protocol it serves.
//
//	strangers := listen.NewStrangers(1024, 128)
//	s, full := strangers.Admit(conn, func() { conn.Close() })
//	if s == nil {
//		conn.Close() // full says which limit was reached
//	}
//	defer s.Release()
//
// [Strangers] bounds the connections of peers that have not proven who they are.
//
// accept(2) also reports errors of the connection that it would have returned: a route that was
// lost during the handshake, for instance. net/http and grpc-go end at most of them. [Steady]
// keeps a listener accepting; [Transient] is for accept loops of their own.
package listen
