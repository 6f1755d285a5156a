package main

import (
	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/https"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/udp"
)

// A limit of 0 in the configuration stays 0 here: the packages have the defaults.

func streamLimits(l conf.Limits) stream.Limits {
	return stream.Limits{
		Joining: l.Joining, JoiningPerAddress: l.JoiningPerAddress, JoinTimeout: l.JoinTimeout, Metadata: l.Metadata,
		Conns: l.Conns, Opens: l.Opens, Dials: l.Dials,
	}
}

func edgeLimits(l conf.EdgeLimits) stream.EdgeLimits {
	return stream.EdgeLimits{Conns: l.Conns, Dials: l.Dials}
}

func httpsLimits(l conf.Limits) https.Limits {
	return https.Limits{
		Strangers: l.Strangers, StrangersPerAddress: l.StrangersPerAddress, HandshakeTimeout: l.HandshakeTimeout,
		ConnsPerAddress: l.ConnsPerAddress, Headers: l.Headers,
	}
}

func udpLimits(l conf.Limits) udp.Limits {
	return udp.Limits{Flows: l.Flows, FlowsPerAddress: l.FlowsPerAddress}
}
