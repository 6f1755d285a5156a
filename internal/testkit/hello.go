package testkit

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"time"
)

// ClientHello returns the ClientHello that crypto/tls sends for a server name and ALPN.
func ClientHello(serverName string, protocols ...string) []byte {
	var sent bytes.Buffer
	cfg := &tls.Config{ServerName: serverName, NextProtos: protocols, InsecureSkipVerify: true}
	tls.Client(&recorder{w: &sent}, cfg).Handshake() //nolint:errcheck // nobody answers
	return sent.Bytes()
}

// recorder is a conn that records what is written. Reading returns io.EOF.
type recorder struct {
	net.Conn
	w io.Writer
}

func (r *recorder) Write(p []byte) (int, error)      { return r.w.Write(p) }
func (r *recorder) Read([]byte) (int, error)         { return 0, io.EOF }
func (r *recorder) Close() error                     { return nil }
func (r *recorder) SetDeadline(time.Time) error      { return nil }
func (r *recorder) SetWriteDeadline(time.Time) error { return nil }
