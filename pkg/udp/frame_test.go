package udp

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"tunnel.example/tunnel/pkg/tunnel"
)

// encode returns a frame as bytes.
func encode(k kind, id flowID, payload []byte) []byte {
	b := make([]byte, frameHeader, frameHeader+len(payload))
	putHeader(b, k, id, len(payload))
	return append(b, payload...)
}

// collect feeds pieces of bytes to a splitter and returns what it has handled, as text.
func collect(pieces ...[]byte) (frames []string, err error) {
	s := splitter{handle: func(f frame) error {
		frames = append(frames, fmt.Sprintf("%d %d %x", f.kind, f.flow, f.payload))
		return nil
	}}
	for _, p := range pieces {
		if err = s.feed(p); err != nil {
			break
		}
	}
	return frames, err
}

// Frames are the same however the conn cuts their bytes.
func TestFrames(t *testing.T) {
	var all []byte
	var want []string
	for i, payload := range []string{"", "x", "second", strings.Repeat("long ", 40), ""} {
		id := flowID(i * 0x01020304)
		all = append(all, encode(kindDatagram, id, []byte(payload))...)
		want = append(want, fmt.Sprintf("0 %d %x", id, payload))
	}
	all = append(all, encode(9, 1, []byte("unknown kinds are frames, too"))...)
	want = append(want, fmt.Sprintf("9 1 %x", "unknown kinds are frames, too"))
	for first := range all {
		for second := first; second < len(all); second += 7 {
			got, err := collect(all[:first], all[first:second], all[second:])
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Fatalf("cut at %d and %d: %v, %v\nwant %v", first, second, got, err, want)
			}
		}
	}
	one := make([][]byte, len(all))
	for i := range all {
		one[i] = all[i : i+1]
	}
	if got, err := collect(one...); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("byte by byte: %v, %v", got, err)
	}
}

// The longest datagram is 65,507 bytes; the wire of the specification has eight bytes before it.
func TestFrameOnTheWire(t *testing.T) {
	got := encode(kindDatagram, 0x01020304, make([]byte, 65507))[:frameHeader]
	if want := []byte{0, 1, 2, 3, 4, 0, 0xff, 0xe3}; !bytes.Equal(got, want) {
		t.Errorf("header % x, want % x", got, want)
	}
	if got, want := (opening{addr: "a:1", caller: "c:2", datagram: []byte("d")}).encode(),
		"\x0a\x03a:1\x12\x03c:2\x1a\x01d"; string(got) != want {
		t.Errorf("open %q, want %q", got, want)
	}
	if got, want := (ending{code: tunnel.Denied, text: "no"}).encode(), "\x08\x01\x12\x02no"; string(got) != want {
		t.Errorf("end %q, want %q", got, want)
	}
}

func TestFramesThatAreTooLong(t *testing.T) {
	for _, header := range [][]byte{
		{0, 0, 0, 0, 1, 0, 0xff, 0xe4},        // a datagram of 65,508 bytes
		{2, 0, 0, 0, 1, 0, 8, 1},              // an end of 2,049 bytes
		{77, 0, 0, 0, 1, 0, 8, 1},             // a frame of an unknown kind
		{1, 0, 0, 0, 1, 1, 7, 0xe4},           // an open
		{0, 0, 0, 0, 1, 0xff, 0xff, 0xff, 42}, // and a byte of it
	} {
		if got, err := collect(header); !errors.Is(err, errFrame) || got != nil {
			t.Errorf("% x: %v, %v", header, got, err)
		}
		if got, err := collect(header[:3], header[3:]); !errors.Is(err, errFrame) || got != nil {
			t.Errorf("% x in two pieces: %v, %v", header, got, err)
		}
	}
}

func TestOpening(t *testing.T) {
	for _, o := range []opening{
		{}, {addr: "10.0.0.1:53"}, {caller: "[fe80::1%eth0]:5"},
		{addr: "dns.example:53", caller: "10.0.0.2:40000", datagram: []byte("question")},
		{datagram: make([]byte, maxDatagram), addr: strings.Repeat("a", maxText), caller: "c"},
	} {
		b := o.encode()
		if len(b) > maxDatagram+maxControl {
			t.Errorf("%d bytes", len(b))
		}
		got, err := parseOpening(b)
		if err != nil || got.addr != o.addr || got.caller != o.caller || !bytes.Equal(got.datagram, o.datagram) {
			t.Errorf("%+v became %+v, %v", o, got, err)
		}
	}
	// Unknown fields are for later versions.
	more := append(opening{addr: "a:1"}.encode(), 0x38, 5, 0x42, 1, 'x')
	if o, err := parseOpening(more); err != nil || o.addr != "a:1" {
		t.Errorf("%+v, %v", o, err)
	}
	// A target that cannot be used is not the conn's target instead.
	for _, bad := range []opening{{addr: "a\n:1"}, {addr: "\xff:1"}, {caller: "c\x00"}} {
		if o, err := parseOpening(bad.encode()); !errors.Is(err, errFrame) {
			t.Errorf("%+v is accepted as %+v", bad, o)
		}
	}
	for _, bad := range []string{"\x0a", "\x0a\x05a", "\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "\x07"} {
		if o, err := parseOpening([]byte(bad)); !errors.Is(err, errFrame) {
			t.Errorf("%q is accepted as %+v", bad, o)
		}
	}
}

func TestEnding(t *testing.T) {
	for _, e := range []ending{{}, {code: tunnel.Denied, text: "because"}, {code: tunnel.Draining}} {
		if got, err := parseEnding(e.encode()); err != nil || got != e {
			t.Errorf("%+v became %+v, %v", e, got, err)
		}
	}
	if got, err := parseEnding(ending{code: tunnel.Denied, text: "a\nb"}.encode()); err != nil || got.text != "" {
		t.Errorf("%+v, %v: a text with a line break must not reach the log", got, err)
	}
	if got := (ending{text: strings.Repeat("x", 2000)}).encode(); len(got) > maxControl {
		t.Errorf("%d bytes", len(got))
	}
}

// FuzzFrames: no bytes make the splitter or a parser panic, and the frames do not depend on how the
// bytes are cut.
func FuzzFrames(f *testing.F) {
	f.Add(encode(kindDatagram, 1, []byte("datagram")), uint16(3))
	f.Add(append(encode(kindOpen, 2, opening{addr: "a:1", datagram: []byte("x")}.encode()),
		encode(kindEnd, 2, ending{code: tunnel.Denied, text: "no"}.encode())...), uint16(11))
	f.Add([]byte{0, 0, 0, 0, 1, 0xff, 0xff, 0xff}, uint16(0))
	f.Fuzz(func(t *testing.T, b []byte, cut uint16) {
		whole, wholeErr := collect(b)
		at := int(cut)
		if len(b) > 0 {
			at %= len(b)
		}
		parts, partsErr := collect(b[:min(at, len(b))], b[min(at, len(b)):])
		if !reflect.DeepEqual(whole, parts) || (wholeErr == nil) != (partsErr == nil) {
			t.Errorf("whole %v, %v; cut at %d %v, %v", whole, wholeErr, at, parts, partsErr)
		}
		if o, err := parseOpening(b); err == nil {
			again, err := parseOpening(o.encode())
			if err != nil || again.addr != o.addr || again.caller != o.caller || !bytes.Equal(again.datagram, o.datagram) {
				t.Errorf("%+v became %+v, %v", o, again, err)
			}
		}
		if e, err := parseEnding(b); err == nil {
			if again, err := parseEnding(e.encode()); err != nil || again != e {
				t.Errorf("%+v became %+v, %v", e, again, err)
			}
		}
	})
}
