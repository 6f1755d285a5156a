package udp

import (
	"encoding/binary"
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"

	"tunnel.example/tunnel/pkg/tunnel"
)

// The bytes of a conn are frames, in both directions. A frame is a header of eight bytes, and a
// payload. docs/protocol.md is the specification.
//
//	kind (1 byte) | flow (4 bytes, big-endian) | length of the payload (3 bytes, big-endian) | payload

// kind is the kind of a frame. A receiver ignores kinds that it does not know.
type kind byte

const (
	kindDatagram kind = 0 // both: the payload is one datagram of the flow
	kindOpen     kind = 1 // cloud: a flow begins; the payload is an opening, with the first datagram
	kindEnd      kind = 2 // both: the flow has ended at the sender; the payload is an ending
)

const (
	// frameHeader is the length of a header, in bytes.
	frameHeader = 1 + 4 + 3
	// maxDatagram is the longest payload of a UDP datagram over IPv4, in bytes: 65,535 less the headers
	// of IP (20) and UDP (8). IPv6 permits 65,527: both sides drop such datagrams.
	maxDatagram = 65507
	// maxControl is the longest payload of a frame other than a datagram, in bytes. The datagram in an open
	// does not count.
	maxControl = 2 << 10
	// maxText is the longest text in an opening or an ending, in bytes.
	maxText = 512
)

// flowID names a flow of a conn. The cloud chooses it, and counts up.
type flowID uint32

// frame is one frame. Its payload is valid until the handler returns.
type frame struct {
	kind    kind
	flow    flowID
	payload []byte
}

// putHeader writes the header of a frame to b, which has room for it.
func putHeader(b []byte, k kind, id flowID, length int) {
	b[0] = byte(k)
	binary.BigEndian.PutUint32(b[1:], uint32(id))
	b[5], b[6], b[7] = byte(length>>16), byte(length>>8), byte(length)
}

// errFrame is the error of a frame that breaks the protocol.
var errFrame = errors.New("the peer broke the protocol of UDP frames")

// parseHeader returns the kind, the flow and the length of the payload.
func parseHeader(b []byte) (k kind, id flowID, length int, err error) {
	k, id = kind(b[0]), flowID(binary.BigEndian.Uint32(b[1:]))
	length = int(b[5])<<16 | int(b[6])<<8 | int(b[7])
	most := maxControl
	switch k {
	case kindDatagram:
		most = maxDatagram
	case kindOpen:
		most += maxDatagram
	}
	if length > most {
		err = fmt.Errorf("%w: a frame of kind %d with %d bytes; %d are allowed", errFrame, k, length, most)
	}
	return k, id, length, err
}

// splitter cuts the bytes of a conn into frames. One goroutine owns it.
type splitter struct {
	handle func(frame) error // set once; an error ends the conn
	part   []byte            // the beginning of a frame whose end has not arrived
}

// keepPart is the capacity of splitter.part that a conn keeps between frames, in bytes.
const keepPart = 4 << 10

// feed handles the frames that end in b, and keeps the rest.
func (s *splitter) feed(b []byte) error {
	for len(s.part) > 0 && len(b) > 0 {
		done, rest, err := s.complete(b)
		if err != nil {
			return err
		}
		if b = rest; !done {
			return nil
		}
	}
	for len(b) >= frameHeader {
		k, id, n, err := parseHeader(b)
		if err != nil {
			return err
		}
		if len(b) < frameHeader+n {
			break
		}
		if err := s.handle(frame{k, id, b[frameHeader : frameHeader+n]}); err != nil {
			return err
		}
		b = b[frameHeader+n:]
	}
	s.part = append(s.part, b...)
	return nil
}

// complete appends bytes of b to part until part is a whole frame, and handles the frame. done is false
// if b was too short.
func (s *splitter) complete(b []byte) (done bool, rest []byte, err error) {
	if missing := frameHeader - len(s.part); missing > 0 {
		missing = min(missing, len(b))
		s.part, b = append(s.part, b[:missing]...), b[missing:]
		if len(s.part) < frameHeader {
			return false, nil, nil
		}
	}
	k, id, n, err := parseHeader(s.part)
	if err != nil {
		return false, nil, err
	}
	missing := min(frameHeader+n-len(s.part), len(b))
	s.part, b = append(s.part, b[:missing]...), b[missing:]
	if len(s.part) < frameHeader+n {
		return false, nil, nil
	}
	err = s.handle(frame{k, id, s.part[frameHeader:]})
	if s.part = s.part[:0]; cap(s.part) > keepPart {
		s.part = nil
	}
	return true, b, err
}

// opening is the payload of an open, a protobuf message.
type opening struct {
	addr     string // field 1: the flow's target; "": the target of the conn
	caller   string // field 2: the caller's address, for the edge's log
	datagram []byte // field 3: the first datagram of the flow
}

const (
	openingAddr, openingCaller, openingDatagram = 1, 2, 3

	endingCode, endingText = 1, 2
)

// encode returns the payload of an open.
func (o opening) encode() []byte {
	b := make([]byte, 0, len(o.addr)+len(o.caller)+len(o.datagram)+16)
	b = appendText(b, openingAddr, o.addr)
	b = appendText(b, openingCaller, o.caller)
	b = protowire.AppendTag(b, openingDatagram, protowire.BytesType)
	return protowire.AppendBytes(b, o.datagram)
}

// parseOpening parses the payload of an open. It ignores unknown fields. The datagram is a part of b.
func parseOpening(b []byte) (o opening, err error) {
	err = fields(b, func(field protowire.Number, _ uint64, text []byte) {
		switch field {
		case openingAddr:
			o.addr = string(text)
		case openingCaller:
			o.caller = string(text)
		case openingDatagram:
			o.datagram = text
		}
	})
	if len(o.datagram) > maxDatagram {
		return o, fmt.Errorf("%w: a datagram of %d bytes; %d are allowed", errFrame, len(o.datagram), maxDatagram)
	}
	// A target that cannot be read must not become "", the target of the conn.
	if err == nil && (!printable(o.addr) || !printable(o.caller)) {
		err = fmt.Errorf("%w: an open with a text of %d bytes that is too long or not printable",
			errFrame, max(len(o.addr), len(o.caller)))
	}
	return o, err
}

// openingSize returns the length of the datagram in the payload of an open.
func openingSize(b []byte) (size int) {
	fields(b, func(field protowire.Number, _ uint64, text []byte) { //nolint:errcheck // encode has made it
		if field == openingDatagram {
			size = len(text)
		}
	})
	return size
}

// ending is the payload of an end, a protobuf message: why the flow has ended.
type ending struct {
	code tunnel.Code // field 1; 0: the flow was idle, or made room for another flow
	text string      // field 2: for people
}

// encode returns the payload of an end.
func (e ending) encode() []byte {
	var b []byte
	if e.code != 0 {
		b = protowire.AppendTag(b, endingCode, protowire.VarintType)
		b = protowire.AppendVarint(b, uint64(e.code))
	}
	return appendText(b, endingText, e.text)
}

// parseEnding parses the payload of an end. It ignores unknown fields, and a text that is not printable.
func parseEnding(b []byte) (e ending, err error) {
	err = fields(b, func(field protowire.Number, number uint64, text []byte) {
		switch field {
		case endingCode:
			e.code = tunnel.Code(min(number, 255)) //nolint:gosec // bounded in the same expression
		case endingText:
			e.text = string(text)
		}
	})
	if !printable(e.text) {
		e.text = ""
	}
	return e, err
}

// appendText appends a field with a text, unless the text is empty.
func appendText(b []byte, field protowire.Number, text string) []byte {
	if text == "" {
		return b
	}
	b = protowire.AppendTag(b, field, protowire.BytesType)
	return protowire.AppendString(b, text[:min(len(text), maxText)])
}

// fields calls f for each field of a protobuf message: number is the value of a varint, text that of
// a field with bytes.
func fields(b []byte, f func(field protowire.Number, number uint64, text []byte)) error {
	for len(b) > 0 {
		field, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return fmt.Errorf("%w: %w", errFrame, protowire.ParseError(n))
		}
		b = b[n:]
		size := protowire.ConsumeFieldValue(field, typ, b)
		if size < 0 {
			return fmt.Errorf("%w: %w", errFrame, protowire.ParseError(size))
		}
		switch typ {
		case protowire.VarintType:
			number, _ := protowire.ConsumeVarint(b)
			f(field, number, nil)
		case protowire.BytesType:
			text, _ := protowire.ConsumeBytes(b)
			f(field, 0, text)
		}
		b = b[size:]
	}
	return nil
}

// printable reports whether a text of a peer may stand in logs and be dialled: it is not too long, and
// has only printable ASCII characters.
func printable(s string) bool {
	if len(s) > maxText {
		return false
	}
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}
