package services

import (
	"fmt"
	"strconv"
	"strings"
)

// Target is what an edge asks the cloud to connect to: a port of an endpoint. It names the path of the endpoint and no
// address. So an edge reaches only endpoints of the cluster's Services.
type Target struct {
	Endpoint Path
	Protocol string // TCP or UDP
	Port     uint16
}

// String returns the target as the edge sends it to the cloud: PATH PROTOCOL PORT.
func (t Target) String() string {
	return t.Endpoint + " " + t.Protocol + " " + strconv.Itoa(int(t.Port))
}

// Network returns the network of a request for a conn to the target, as package tunnel names it: "tcp" or "udp".
func (t Target) Network() string { return strings.ToLower(t.Protocol) }

// ParseTarget parses the text that String returns.
func ParseTarget(s string) (Target, error) {
	fields := strings.Split(s, " ")
	if len(fields) != 3 {
		return Target{}, fmt.Errorf("%q is no target: it has to be PATH PROTOCOL PORT", s)
	}
	parts := split(fields[0])
	if parts == nil || parts[0] != kindEndpoint {
		return Target{}, fmt.Errorf("%q is no path of an endpoint", fields[0])
	}
	if fields[1] != "TCP" && fields[1] != "UDP" {
		return Target{}, fmt.Errorf("%q is neither TCP nor UDP", fields[1])
	}
	port, err := strconv.ParseUint(fields[2], 10, 16)
	if err != nil || port == 0 || strconv.FormatUint(port, 10) != fields[2] {
		return Target{}, fmt.Errorf("%q is no port", fields[2])
	}
	return Target{Endpoint: fields[0], Protocol: fields[1], Port: uint16(port)}, nil
}

// AddressOf returns the address of an endpoint.
func AddressOf(endpoint Path) string {
	parts := split(endpoint)
	if parts == nil || parts[0] != kindEndpoint {
		return ""
	}
	return parts[len(parts)-1]
}

// ServiceOf returns the path of the Service of an endpoint.
func ServiceOf(endpoint Path) Path {
	if !strings.HasPrefix(endpoint, kindEndpoint+"/") || split(endpoint) == nil {
		return ""
	}
	return kindService + "/" + nameIn(endpoint)
}
