// Package listen holds what every listener of ours needs, whatever protocol it serves.
//
//	strangers := listen.NewStrangers(1024, 128)
//	s, full := strangers.Admit(addr, func() { conn.Close() })
//	if s == nil {
//		conn.Close() // full says which limit was reached
//	}
//	defer s.Release()
//
// [Strangers] bounds the connections of peers that have not proven who they are.
package listen
