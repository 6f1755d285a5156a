package main

import (
	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/services/mirror"
)

// addMirror adds the modules by which pods of the cluster reach Services, if the configuration has
// [mode.cloud.services.mirror].
func (w *cloudWiring) addMirror() {
	c, client := w.conf.Services.Mirror, w.cluster.client
	if !c.On() {
		return
	}
	objects := client.Mirrors(kube.MirrorsConfig{
		Annotation: mirror.Annotation, Label: mirror.Label, Value: c.Namespace, Namespace: c.Namespace, Service: c.Service,
	}, w.counters, w.log)
	m := mirror.New(mirror.Config{
		Objects: objects, Owner: c.Namespace, First: c.First, Last: c.Last, Namespaces: w.conf.Services.Namespaces,
		Serve: w.doors.egress.Serve, Sockets: w.sockets, Counters: w.counters, Log: w.log,
	})
	w.mayDial = m.MayDial
	w.add(m, m.Ready)
	w.addWriter(mirror.NewWriter(m, client.Lease(c.Namespace, kube.MirrorLease, c.Identity, w.log)))
}
