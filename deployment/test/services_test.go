package test

import (
	"slices"
	"testing"

	"helm.sh/helm/v3/pkg/chartutil"
	corev1 "k8s.io/api/core/v1"
)

// The pods of edge-services have the rights that the page docs/services.md names, and no further one: of the machine,
// the edge writes to the folder of its state alone.
func TestServicesRights(t *testing.T) {
	pod := templates(t, kustomized(t, "edge-services"))[0].Spec
	if !pod.HostNetwork || pod.HostPID || pod.HostIPC {
		t.Errorf("host namespaces: network %t, processes %t, IPC %t", pod.HostNetwork, pod.HostPID, pod.HostIPC)
	}
	if len(pod.InitContainers) != 0 || len(pod.Containers) != 1 {
		t.Fatalf("%d init containers, %d containers", len(pod.InitContainers), len(pod.Containers))
	}
	wantRights(t, pod, pod.Containers[0], []corev1.Capability{"NET_ADMIN"}, []string{"/var/lib/tunnel"})
}

// An edge of the chart may give pods their network and serve Services, with a state and a socket in other folders.
func TestServicesAndCNI(t *testing.T) {
	for name, tt := range map[string]struct {
		admin string
		want  []string // volumes
	}{
		"a folder of its own": {"/run/edge/admin.sock", []string{"services", "admin"}},
		"the folder of state": {"/srv/tunnel/admin.sock", []string{"services"}},
		"no socket":           {"", []string{"services"}},
	} {
		t.Run(name, func(t *testing.T) {
			add, err := chartutil.ReadValues([]byte(`
edge: {config: {services: {state: /srv/tunnel/services.db}, admin: {socket: "` + tt.admin + `"}}}`))
			if err != nil {
				t.Fatal(err)
			}
			text, _, err := helm(t, "tunnel-edge", chartutil.CoalesceTables(add, readValues(t, "edge-cni")))
			if err != nil {
				t.Fatal(err)
			}
			pod := templates(t, parse(t, text))[0].Spec
			writable := []string{"/etc/cni/net.d", "/var/lib/cni/tunnel", "/srv/tunnel"}
			wantRights(t, pod, pod.Containers[0], []corev1.Capability{"NET_ADMIN"}, writable)
			var volumes []string
			for _, v := range pod.Volumes {
				volumes = append(volumes, v.Name)
			}
			want := append([]string{"config", "ca", "token", "cni-conf", "cni-bin", "cni-addresses"}, tt.want...)
			if !slices.Equal(volumes, want) {
				t.Errorf("the volumes are %q, want %q", volumes, want)
			}
		})
	}
}
