package interop

import (
	_ "sigs.k8s.io/apiserver-network-proxy/cmd/agent/app"
	_ "sigs.k8s.io/apiserver-network-proxy/cmd/server/app"
	_ "sigs.k8s.io/apiserver-network-proxy/konnectivity-client/pkg/client"
	_ "tunnel/pkg/egress"
)
