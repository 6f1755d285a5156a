package balancer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/pires/go-proxyproto"
)

// v2 returns a header of version 2 with a command, a family, and the rest.
func v2(command, family byte, rest ...byte) string {
	length := binary.BigEndian.AppendUint16(nil, uint16(len(rest)))
	return signature2 + string([]byte{command, family}) + string(length) + string(rest)
}

// Addresses of version 2: 192.0.2.1:1000 to 10.0.0.1:443, and with IPv6 [2001:db8::1]:1000 to [::2]:443.
var (
	tcp4 = []byte{192, 0, 2, 1, 10, 0, 0, 1, 1000 >> 8, 1000 & 255, 1, 187}
	tcp6 = slicesOf(net.ParseIP("2001:db8::1"), net.ParseIP("::2"), []byte{1000 >> 8, 1000 & 255, 1, 187})
	// In version 2 an IPv4 caller of an IPv6 socket.
	mapped = slicesOf(net.ParseIP("192.0.2.1"), net.ParseIP("10.0.0.1"), []byte{1000 >> 8, 1000 & 255, 1, 187})
)

func slicesOf(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// headers are what readHeader makes of bytes. The bytes after a header stay unread.
func headers() map[string]struct{ in, caller, dest, err string } {
	tlv := []byte{0x04, 0, 3, 0, 0, 0}
	return map[string]struct{ in, caller, dest, err string }{
		"v1, IPv4": {in: "PROXY TCP4 192.0.2.1 10.0.0.1 1000 443\r\n", caller: "192.0.2.1:1000", dest: "10.0.0.1:443"},
		"v1, IPv6": {in: "PROXY TCP6 2001:db8::1 ::2 1000 443\r\n", caller: "[2001:db8::1]:1000", dest: "[::2]:443"},
		"v1, mapped IPv4": {
			in: "PROXY TCP6 ::ffff:192.0.2.1 ::ffff:10.0.0.1 1000 443\r\n", caller: "192.0.2.1:1000", dest: "10.0.0.1:443"},
		"v1, unknown": {in: "PROXY UNKNOWN\r\n"},
		"v1, unknown and more": {
			in: "PROXY UNKNOWN ffff:f:f:f:f:f:f:ffff ffff:f:f:f:f:f:f:ffff 65535 65535\r\n"},
		"v2, IPv4":           {in: v2(0x21, 0x11, tcp4...), caller: "192.0.2.1:1000", dest: "10.0.0.1:443"},
		"v2, IPv6":           {in: v2(0x21, 0x21, tcp6...), caller: "[2001:db8::1]:1000", dest: "[::2]:443"},
		"v2, mapped IPv4":    {in: v2(0x21, 0x21, mapped...), caller: "192.0.2.1:1000", dest: "10.0.0.1:443"},
		"v2, with TLVs":      {in: v2(0x21, 0x11, slicesOf(tcp4, tlv)...), caller: "192.0.2.1:1000", dest: "10.0.0.1:443"},
		"v2, local":          {in: v2(0x20, 0)},
		"v2, local and more": {in: v2(0x20, 0x11, tcp4...)},
		"v2, unix socket":    {in: v2(0x21, 0x31, make([]byte, 216)...)},

		"nothing":            {err: errSilent.Error()},
		"TLS":                {in: "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", err: errNoHeader.Error()},
		"one other byte":     {in: "x", err: errNoHeader.Error()},
		"almost v1":          {in: "PROXYING", err: errNoHeader.Error()},
		"almost v2":          {in: signature2[:11] + "x", err: errNoHeader.Error()},
		"v1, cut":            {in: "PROXY TCP4 192.0.2.1 10.0", err: "the PROXY header is not complete: EOF"},
		"v1, cut early":      {in: "PRO", err: "the PROXY header is not complete: EOF"},
		"v1, endless":        {in: "PROXY TCP4 " + strings.Repeat("1", 200), err: "no line end within 107 bytes"},
		"v1, UDP":            {in: "PROXY UDP4 192.0.2.1 10.0.0.1 1000 443\r\n", err: "malformed PROXY header"},
		"v1, a port too big": {in: "PROXY TCP4 192.0.2.1 10.0.0.1 65536 443\r\n", err: "malformed PROXY header"},
		"v1, no CR":          {in: "PROXY TCP4 192.0.2.1 10.0.0.1 1000 443\n", err: "malformed PROXY header"},
		"v1, other family":   {in: "PROXY TCP4 2001:db8::1 ::2 1000 443\r\n", err: "malformed PROXY header"},
		"v2, cut":            {in: v2(0x21, 0x11, tcp4...)[:20], err: "the PROXY header is not complete"},
		"v2, too short":      {in: v2(0x21, 0x11, tcp4[:8]...), err: "malformed PROXY header"},
		"v2, too long": {
			in: v2(0x21, 0x11, make([]byte, maxRest2+1)...), err: "announces 4097 bytes; 4096 are allowed"},
		"v2, UDP":       {in: v2(0x21, 0x12, tcp4...), err: "not of a TCP connection"},
		"v2, no family": {in: v2(0x21, 0), err: "malformed PROXY header"},
		"v2, version 3": {in: v2(0x31, 0x11, tcp4...), err: "malformed PROXY header"},
	}
}

func TestReadHeader(t *testing.T) {
	const more = "the caller's bytes"
	for name, test := range headers() {
		for pieces, reader := range map[string]func(io.Reader) io.Reader{
			"at once": func(r io.Reader) io.Reader { return r },
			"by byte": func(r io.Reader) io.Reader { return oneByte{r} },
		} {
			t.Run(name+" "+pieces, func(t *testing.T) {
				in := test.in
				if test.err == "" {
					in += more
				}
				r := strings.NewReader(in)
				got, err := readHeader(reader(r))
				if test.err != "" {
					if err == nil || !strings.Contains(err.Error(), test.err) {
						t.Errorf("error %v, want %q in it", err, test.err)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if text(got.caller) != test.caller || text(got.dest) != test.dest {
					t.Errorf("caller %v, destination %v; want %s, %s", got.caller, got.dest, test.caller, test.dest)
				}
				if rest, _ := io.ReadAll(r); string(rest) != more {
					t.Errorf("%q is left to read, want %q", rest, more)
				}
			})
		}
	}
}

// text returns an address as text; "": none.
func text(a net.Addr) string {
	if a == nil {
		return ""
	}
	return a.String()
}

// oneByte returns one byte at a time.
type oneByte struct{ r io.Reader }

func (r oneByte) Read(p []byte) (int, error) { return r.r.Read(p[:min(1, len(p))]) }

// The parser's own bound must not be lower than ours.
func TestBoundOfParser(t *testing.T) {
	if proxyproto.MaxV2HeaderSize < maxRest2 {
		t.Errorf("the parser accepts %d bytes, and this package reads %d", proxyproto.MaxV2HeaderSize, maxRest2)
	}
}

func TestBeginsHeader(t *testing.T) {
	for first, want := range map[string]bool{
		"PROXY": true, "PROXY TCP4 192.0.2.1": true, "\r\n\r\n\x00": true, signature2 + "!": true,
		"": false, "PROX": false, "\r\n\r\n": false, "PROTO": false, "\r\n\r\nGET": false, signature2[:11] + "x": false,
		"\x16\x03\x01\x02\x00": false,
	} {
		if got := beginsHeader([]byte(first)); got != want {
			t.Errorf("%q: %t", first, got)
		}
	}
}

// addressed is a connection with two addresses.
type addressed struct {
	net.Conn
	local, remote net.Addr
}

func (c addressed) LocalAddr() net.Addr  { return c.local }
func (c addressed) RemoteAddr() net.Addr { return c.remote }

// A header that this package writes says what readHeader reads.
func TestHeader(t *testing.T) {
	addr := func(s string) net.Addr {
		a, err := net.ResolveTCPAddr("tcp", s)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	for _, a := range []struct{ caller, dest string }{
		{"192.0.2.1:1000", "10.0.0.1:443"}, {"[2001:db8::1]:1000", "[::2]:443"},
	} {
		for v, begin := range map[Version]string{1: "PROXY TCP", 2: signature2} {
			h, err := Header(v, addressed{remote: addr(a.caller), local: addr(a.dest)})
			if err != nil || !strings.HasPrefix(string(h), begin) {
				t.Fatalf("%q, %v", h, err)
			}
			got, err := readHeader(bytes.NewReader(h))
			if err != nil || text(got.caller) != a.caller || text(got.dest) != a.dest {
				t.Errorf("version %d: %v, %v", v, got, err)
			}
		}
	}
	// The caller of a balancer dialled the balancer's address.
	via := &Conn{caller: addr("192.0.2.1:1"), dest: addr("10.0.0.9:443")}
	if h, err := Header(1, via); string(h) != "PROXY TCP4 192.0.2.1 10.0.0.9 1 443\r\n" {
		t.Errorf("%q, %v", h, err)
	}
	// A unix socket has no address for the header.
	unix := &net.UnixAddr{Net: "unix"}
	if h, err := Header(1, addressed{local: unix, remote: &net.TCPAddr{}}); string(h) != "PROXY UNKNOWN\r\n" {
		t.Errorf("%q, %v", h, err)
	}
}

func FuzzReadHeader(f *testing.F) {
	for _, h := range headers() {
		f.Add([]byte(h.in))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		r := bytes.NewReader(in)
		got, err := readHeader(r)
		read := len(in) - r.Len()
		switch {
		case read > prefix2+maxRest2:
			t.Errorf("%d bytes were read", read)
		case err != nil && (got.caller != nil || got.dest != nil):
			t.Errorf("%v in spite of %v", got, err)
		case err == nil && (got.caller == nil) != (got.dest == nil):
			t.Errorf("only one address: %v", got)
		case err == nil && !beginsHeader(in):
			t.Errorf("a header was found in %q", in)
		}
		if err != nil {
			return
		}
		// Bytes after the header are not read, whatever they are.
		again := io.MultiReader(bytes.NewReader(in[:read]), failing{})
		if repeated, err := readHeader(again); err != nil || text(repeated.caller) != text(got.caller) {
			t.Errorf("the header alone is read as %v, %v", repeated, err)
		}
	})
}

// failing is a reader of which nothing may be read.
type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errors.New("read too far") }

func BenchmarkReadHeader(b *testing.B) {
	for name, in := range map[string]string{
		"v1": "PROXY TCP4 192.0.2.1 10.0.0.1 1000 443\r\n", "v2": v2(0x21, 0x11, tcp4...),
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := readHeader(strings.NewReader(in)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
