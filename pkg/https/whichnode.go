package https

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"

	"tunnel.example/tunnel/pkg/tunnel"
)

// This file answers one question: which node is a terminated request for?
//
// kube-apiserver does not always say. Without --kubelet-certificate-authority it sends no SNI on
// upgrades. For port-forward, and for exec and attach by SPDY, the Host is the one that kubectl
// used for kube-apiserver itself: newThrottledUpgradeAwareProxyHandler
// (kubernetes/pkg/registry/core/pod/rest/subresources.go) leaves UseLocationHost unset. Then only
// the path names the pod, and findpod.go finds its node.

// podRef names a pod on the targets of one port.
type podRef struct {
	port            int // index of FrontDoor.ports
	namespace, name string
}

func (r podRef) String() string { return r.namespace + "/" + r.name }

// podOf returns the pod that the path of a kubelet's streaming API names
// (kubernetes/pkg/kubelet/server/server.go, InstallDebuggingHandlers).
func podOf(path string) (ref podRef, ok bool) {
	s := strings.Split(path, "/")
	if len(s) < 4 || s[0] != "" {
		return podRef{}, false
	}
	switch s[1] {
	case "portForward", "exec", "attach", "run":
	default:
		return podRef{}, false
	}
	// Names of namespaces and pods follow the same rules as names of nodes, or stricter ones.
	for _, name := range s[2:4] {
		if _, err := tunnel.ParseNodeName(name); err != nil {
			return podRef{}, false
		}
	}
	return podRef{namespace: s[2], name: s[3]}, true
}

// answer is a response of our own, in place of the target's.
type answer struct {
	status int
	code   tunnel.Code // of the refusal; 0: none
	text   string

	// For the log. The caller does not see them.
	log    string          // replaces text; "": text
	node   tunnel.NodeName // the node that the request or the connection names; "": none
	denied denial          // kind of the warning; 0: that of code
}

func answerf(status int, code tunnel.Code, format string, args ...any) *answer {
	return &answer{status: status, code: code, text: fmt.Sprintf(format, args...)}
}

// namedBy returns the node that a caller has named, connected or not: by the SNI of its connection, or else by
// the Host of its request; "": it has named none.
func namedBy(sni tunnel.NodeName, r *http.Request) tunnel.NodeName {
	if sni != "" {
		return sni
	}
	if host, err := nodeOf(r.Host); err == nil {
		return host
	}
	return ""
}

// whichNode returns the node for which r is meant, or the answer to give instead. r came over c
// from a verified caller. The first of these that exists is the node:
//
//  1. the node that Host names, if it is connected. (A name that is not a connected node may be a
//     name of kube-apiserver itself.)
//  2. the node that the connection's SNI names, since the caller opened the connection for it.
//  3. the connected node that has the pod in the path.
//
// If Kubernetes can be asked, and the SNI names no connected node, Kubernetes decides about pods
// before Host does: a node may have taken a name of kube-apiserver for its own.
//
// No node gets the request if Host names a connected node, and the SNI or Kubernetes names another.
func (p *proxy) whichNode(r *http.Request, c *clientConn, caller string) (tunnel.NodeName, *answer) {
	host, hostErr := nodeOf(r.Host)
	sni, err := tunnel.ParseNodeName(c.sni)
	hasSNI := err == nil
	ref, ofPod := podOf(r.URL.Path)
	ref.port = c.port
	switch {
	case ofPod && p.f.cfg.Pods != nil && !(hasSNI && p.f.nodes.Holds(sni)):
		node, a := p.findPod(r.Context(), ref, caller)
		if a == nil && hostErr == nil && host != node && p.f.nodes.Holds(host) {
			return "", answerf(http.StatusMisdirectedRequest, 0,
				"the request's Host names node %s, and Kubernetes has pod %s on node %s: call the pod's node",
				host, ref, node)
		}
		return node, a
	case hostErr == nil && p.f.nodes.Holds(host):
		if hasSNI && sni != host && p.f.nodes.Holds(sni) {
			return "", answerf(http.StatusMisdirectedRequest, 0,
				"this connection was opened for node %s and the request is for %s: open another one", sni, host)
		}
		return host, nil
	case hasSNI && p.f.nodes.Holds(sni):
		return sni, nil
	case hasSNI && (hostErr != nil || host != sni):
		return "", p.noSuchNode("node %s is not connected (the connection's SNI names it; "+
			"the request's Host %q is not a connected node)", sni, r.Host)
	case hasSNI:
		return "", p.noSuchNode("node %s is not connected", sni)
	}
	if ofPod {
		node, a := p.findPod(r.Context(), ref, caller)
		if a != nil && a.code == tunnel.NoSuchNode && hostErr == nil && !isIP(host) {
			a = answerf(a.status, a.code, "node %s is not connected, and %s", host, a.text)
		}
		return node, a
	}
	if hostErr != nil {
		return "", answerf(http.StatusBadRequest, 0, "the host of the request must name a node: %v", hostErr)
	}
	return "", p.noSuchNode("node %s is not connected", host)
}

// noSuchNode counts a request for a node that is not connected. No dial follows that would count
// it.
func (p *proxy) noSuchNode(format string, args ...any) *answer {
	p.f.cfg.Counters.Refuse(tunnel.NoSuchNode)
	return answerf(http.StatusBadGateway, tunnel.NoSuchNode, format, args...)
}

// nodeOf returns the node that a Host header names, with or without a port.
func nodeOf(host string) (tunnel.NodeName, error) {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return tunnel.ParseNodeName(strings.ToLower(strings.TrimSuffix(host, ".")))
}

// isIP reports whether n is an IP address.
func isIP(n tunnel.NodeName) bool {
	_, err := netip.ParseAddr(string(n))
	return err == nil
}
