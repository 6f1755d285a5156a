package egress

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"tunnel.example/tunnel/pkg/tunnel"
)

// This file reads SOCKS5 (RFC 1928) at the listeners of HTTP CONNECT. Only the request and its answer differ from HTTP
// CONNECT: connect.go does everything else for both.
//
// The only method is "no authentication required": the listener has authenticated the caller before, by its client
// certificate or by the permissions of the socket. The only command is CONNECT.

const (
	socksVersion = 5 // first byte of a greeting, a request and an answer; HTTP requests begin with a letter instead

	socksNoAuth   = 0x00 // method: no authentication required
	socksNoMethod = 0xff // answer to a greeting: no method is acceptable

	socksConnect = 1 // command

	socksIPv4   = 1 // types of addresses
	socksDomain = 3
	socksIPv6   = 4
)

// Replies of RFC 1928 section 6.
const (
	socksOK                 = 0
	socksFailure            = 1
	socksDenied             = 2
	socksNetworkUnreachable = 3
	socksHostUnreachable    = 4
	socksRefused            = 5
	socksExpired            = 6
	socksBadCommand         = 7
	socksBadAddressType     = 8
)

// Refusals of SOCKS5 itself.
var (
	errSOCKSGreeting    = errors.New("not a SOCKS5 greeting with the method \"no authentication required\"")
	errSOCKSCommand     = errors.New("the only command of SOCKS5 here is CONNECT")
	errSOCKSAddressType = errors.New("an address of SOCKS5 is IPv4, IPv6 or a domain name")
)

// socksRequest reads a greeting from r, answers it to w, reads the request, and returns the target. The greeting begins
// with socksVersion.
func socksRequest(r io.Reader, w io.Writer) (addr string, err error) {
	if err = socksGreeting(r); err != nil {
		return "", err
	}
	if _, err = w.Write([]byte{socksVersion, socksNoAuth}); err != nil {
		return "", fmt.Errorf("answering a SOCKS5 greeting: %w", err)
	}
	head, err := take(r, 4) // version, command, reserved, type of the address
	switch {
	case err != nil:
		return "", err
	case head[0] != socksVersion:
		return "", fmt.Errorf("version %d is not that of a SOCKS5 request", head[0])
	case head[1] != socksConnect:
		return "", errSOCKSCommand
	}
	host, err := socksHost(r, head[3])
	if err != nil {
		return "", err
	}
	port, err := take(r, 2)
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(host, strconv.Itoa(int(binary.BigEndian.Uint16(port)))), nil
}

// socksGreeting reads a greeting. It fails with errSOCKSGreeting if the caller does not offer the method "no
// authentication required".
func socksGreeting(r io.Reader) error {
	head, err := take(r, 2) // version, number of methods
	if err != nil {
		return fmt.Errorf("%w: %w", errSOCKSGreeting, err)
	}
	methods, err := take(r, int(head[1]))
	if err != nil {
		return fmt.Errorf("%w: %w", errSOCKSGreeting, err)
	}
	if !slices.Contains(methods, socksNoAuth) {
		return errSOCKSGreeting
	}
	return nil
}

// socksHost reads the host of a request.
func socksHost(r io.Reader, addressType byte) (string, error) {
	var size int
	switch addressType {
	case socksIPv4:
		size = net.IPv4len
	case socksIPv6:
		size = net.IPv6len
	case socksDomain:
		length, err := take(r, 1)
		if err != nil {
			return "", err
		}
		size = int(length[0])
	default:
		return "", errSOCKSAddressType
	}
	host, err := take(r, size)
	if err != nil {
		return "", err
	}
	if a, ok := netip.AddrFromSlice(host); ok && addressType != socksDomain {
		return a.Unmap().String(), nil
	}
	// A name has no spaces and no control characters, as in a request of HTTP. Brackets would break host:port. Package
	// net would dial its own machine for an empty name.
	if size == 0 || bytes.ContainsFunc(host, func(c rune) bool { return c <= ' ' || c > '~' || c == '[' || c == ']' }) {
		return "", fmt.Errorf("the domain name %q of a SOCKS5 request is not valid", host)
	}
	return string(host), nil
}

// take reads n bytes.
func take(r io.Reader, n int) ([]byte, error) {
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, fmt.Errorf("a SOCKS5 message is incomplete: %w", err)
	}
	return b, nil
}

// socksAnswer returns the answer to a request. The address in the answer is 0.0.0.0:0: the address of the node's socket
// would be of no use to the caller.
func socksAnswer(reply byte) []byte {
	return []byte{socksVersion, reply, 0, socksIPv4, 0, 0, 0, 0, 0, 0}
}

// socksRefusal returns the answer that refuses a greeting or a request because of err.
func socksRefusal(err error) []byte {
	switch {
	case errors.Is(err, errSOCKSGreeting):
		return []byte{socksVersion, socksNoMethod}
	case errors.Is(err, errSOCKSCommand):
		return socksAnswer(socksBadCommand)
	case errors.Is(err, errSOCKSAddressType):
		return socksAnswer(socksBadAddressType)
	}
	if r, ok := errors.AsType[*tunnel.Refusal](err); ok {
		switch r.Code {
		case tunnel.Denied:
			return socksAnswer(socksDenied)
		case tunnel.NoSuchNode: // no connected node reaches the address
			return socksAnswer(socksNetworkUnreachable)
		case tunnel.Unreachable:
			return socksAnswer(socksHostUnreachable)
		case tunnel.Refused:
			return socksAnswer(socksRefused)
		case tunnel.Timeout:
			return socksAnswer(socksExpired)
		}
	}
	return socksAnswer(socksFailure)
}
