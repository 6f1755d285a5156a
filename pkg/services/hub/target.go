package hub

import (
	"net"
	"net/netip"
	"slices"
	"strconv"

	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Category is the category of requests for endpoints on edge nodes: the name of the module that dials them there.
const Category = "services"

// Target decides whether a node may reach a target (services.Target), and returns the request to dial it. If the
// request names no node, the cloud itself dials. An edge may reach endpoints of Services that the hub sends to edges,
// on ports of these endpoints, and nothing else. A Service without ClusterIP, or of another proxy, is sent only for its
// name: Target refuses its endpoints. It also refuses the endpoints of a Service of which a node may use only its own.
func (h *Hub) Target(from tunnel.NodeName, text string) (tunnel.Request, *tunnel.Refusal) {
	request, refusal := h.target(from, text)
	if refusal != nil && refusal.Code == tunnel.Denied {
		if skipped, ok := h.denials.Allow(); ok {
			h.log.Warn("an edge asks for an endpoint that it may not reach", "node", string(from),
				"target", tunnel.Printable(text), "err", refusal, "skipped", skipped)
		}
	}
	return request, refusal
}

// target does what Target says, and logs nothing.
func (h *Hub) target(from tunnel.NodeName, text string) (tunnel.Request, *tunnel.Refusal) {
	target, err := services.ParseTarget(text)
	if err != nil {
		return tunnel.Request{}, tunnel.Refusef(tunnel.Denied, "%v", err)
	}
	value, synced := h.endpoint(target.Endpoint)
	if !synced {
		return tunnel.Request{}, tunnel.Refusef(tunnel.Unreachable, "the cloud does not know the Services yet: try again")
	}
	if value == nil {
		return tunnel.Request{}, tunnel.Refusef(tunnel.Denied,
			"%s is not an endpoint of a Service that this cloud sends to edges, or only callers on its node may use it; "+
				"it may just have been deleted", target.Endpoint)
	}
	var e services.Endpoint
	if err = proto.Unmarshal(value, &e); err != nil {
		return tunnel.Request{}, tunnel.Refusef(tunnel.Internal, "%s: %v", target.Endpoint, err)
	}
	addr, err := netip.ParseAddr(e.GetAddress())
	has := slices.ContainsFunc(e.GetPorts(), func(p *services.Port) bool {
		return p.GetProtocol() == target.Protocol && p.GetPort() == uint32(target.Port)
	})
	on := tunnel.NodeName(services.Home(&e))
	edge := h.isEdge(on)
	switch {
	case !has:
		return tunnel.Request{}, tunnel.Refusef(tunnel.Denied, "%s has no port %d of %s",
			target.Endpoint, target.Port, target.Protocol)
	// Kubernetes accepts no such address in an EndpointSlice. It would be a port of the machine itself.
	case err != nil || !addr.IsGlobalUnicast():
		return tunnel.Request{}, tunnel.Refusef(tunnel.Denied, "%s is no address of an endpoint", e.GetAddress())
	case on != "" && on == from:
		return tunnel.Request{}, tunnel.Refusef(tunnel.Denied, "%s is on this node: connect to it directly", target.Endpoint)
	case !edge && !h.cfg.Cluster && on == "":
		return tunnel.Request{}, tunnel.Refusef(tunnel.Denied,
			`%s is on no node: the cloud lets edges reach it with allow = ["cluster"] in [mode.cloud.services]`, target.Endpoint)
	case !edge && !h.cfg.Cluster:
		return tunnel.Request{}, tunnel.Refusef(tunnel.Denied, "%s is on %s, whose edge serves no Services: "+
			`the cloud lets edges reach it with allow = ["cluster"] in [mode.cloud.services]`, target.Endpoint, on)
	default:
		request := tunnel.Request{
			Category: Category, Network: target.Network(),
			Addr:   net.JoinHostPort(addr.String(), strconv.Itoa(int(target.Port))),
			Caller: "node " + string(from),
		}
		if edge {
			request.Node = on
		}
		return request, nil
	}
}

// endpoint returns the value of an endpoint, or nil if edges do not relay the endpoint's Service. synced says whether
// the hub knows all objects.
func (h *Hub) endpoint(p services.Path) (value []byte, synced bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	item, service := h.itemLocked(p), h.itemLocked(services.ServiceOf(p))
	if item == nil || service == nil {
		return nil, h.synced
	}
	var s services.Service
	if proto.Unmarshal(service.value, &s) != nil || s.GetHeadless() || s.GetExternalName() != "" || s.GetOtherProxy() ||
		services.NodeLocal(&s) {
		return nil, h.synced
	}
	return item.value, h.synced
}

// isEdge reports whether the edge of a Node serves Services, or did so when it was connected last.
func (h *Hub) isEdge(node tunnel.NodeName) bool {
	serves := h.serves(node) // Joined may come a moment later
	h.mu.Lock()
	defer h.mu.Unlock()
	return (serves || h.joined[node]) && h.itemLocked(services.NodePath(string(node))) != nil
}
