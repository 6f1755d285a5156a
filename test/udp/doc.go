// Package udp has real clients speak with real servers through UDP ports of the tunnel: DNS, SNMP, syslog
// and CoAP with programs of Debian, QUIC and WireGuard with modules of Go.
//
// `make udp` installs the programs and runs the tests. The folder is a Go module of its own, so that the
// tunnel does not depend on these modules.
package udp
