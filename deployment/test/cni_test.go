package test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
)

// The pods of edge-cni have the rights that the page docs/cni.md names, and no further one: the edge writes to the
// folders of network configurations and of reservations alone, and the init container to the folder of plugins alone.
func TestCNIRights(t *testing.T) {
	pod := templates(t, kustomized(t, "edge-cni"))[0].Spec
	if !pod.HostNetwork || pod.HostPID || pod.HostIPC {
		t.Errorf("host namespaces: network %t, processes %t, IPC %t", pod.HostNetwork, pod.HostPID, pod.HostIPC)
	}
	if len(pod.InitContainers) != 1 || len(pod.Containers) != 1 {
		t.Fatalf("%d init containers, %d containers", len(pod.InitContainers), len(pod.Containers))
	}
	wantRights(t, pod, pod.InitContainers[0], nil, []string{"/opt/cni/bin"})
	wantRights(t, pod, pod.Containers[0], []corev1.Capability{"NET_ADMIN"},
		[]string{"/etc/cni/net.d", "/var/lib/cni/tunnel"})
}

// The pod of cni-remove.yaml is valid, of the version that the overlays install, and has the folders of edge-cni.
func TestCNIRemove(t *testing.T) {
	objects := readYAML(t, "../cni-remove.yaml")
	if len(objects) != 1 {
		t.Fatalf("%d objects", len(objects))
	}
	text, err := json.Marshal(objects[0])
	if err != nil {
		t.Fatal(err)
	}
	var pod corev1.Pod
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	if _, _, err := decoder.Decode(text, nil, &pod); err != nil {
		t.Fatal(err)
	}
	if want := "tunnel:" + appVersion(t); pod.Spec.Containers[0].Image != want ||
		"tunnel:"+pod.Labels["app.kubernetes.io/version"] != want {
		t.Errorf("image %s, labels %v; want %s", pod.Spec.Containers[0].Image, pod.Labels, want)
	}
	if pod.Namespace != "kube-system" || pod.Spec.NodeName != "NODE" || !strings.HasSuffix(pod.Name, "-NODE") {
		t.Errorf("%s/%s on %s", pod.Namespace, pod.Name, pod.Spec.NodeName)
	}
	wantRights(t, pod.Spec, pod.Spec.Containers[0], []corev1.Capability{"NET_ADMIN"},
		[]string{"/etc/cni/net.d", "/opt/cni/bin", "/var/lib/cni"})
	edge := templates(t, kustomized(t, "edge-cni"))[0].Spec
	for _, v := range pod.Spec.Volumes {
		i := slices.IndexFunc(edge.Volumes, func(e corev1.Volume) bool { return e.Name == v.Name })
		if v.Name != "cni-data" && (i < 0 || edge.Volumes[i].HostPath.Path != v.HostPath.Path) {
			t.Errorf("volume %s is %s, and edge-cni has another", v.Name, v.HostPath.Path)
		}
	}
}

// wantRights checks the capabilities of a container, and the folders of the machine to which the container can write.
// The arguments of the container name the folders, if the program is not the edge: edge.toml has those.
func wantRights(t *testing.T, pod corev1.PodSpec, c corev1.Container, add []corev1.Capability, folders []string) {
	t.Helper()
	s := c.SecurityContext
	if s == nil || s.Capabilities == nil || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation ||
		s.Privileged != nil || !slices.Equal(s.Capabilities.Add, add) ||
		!slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) {
		t.Errorf("%s: security context %+v", c.Name, s)
	}
	var writable []string
	for _, m := range c.VolumeMounts {
		i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		if i < 0 {
			t.Fatalf("%s: no volume %s", c.Name, m.Name)
		}
		v := pod.Volumes[i].HostPath
		if v == nil {
			continue
		}
		if v.Path != m.MountPath || v.Type == nil || *v.Type != corev1.HostPathDirectoryOrCreate {
			t.Errorf("%s: %s is at %s, type %v", c.Name, v.Path, m.MountPath, v.Type)
		}
		if !m.ReadOnly {
			writable = append(writable, v.Path)
		}
		if c.Args[0] == "cni" && !slices.ContainsFunc(c.Args, func(a string) bool { return strings.HasPrefix(a, v.Path) }) {
			t.Errorf("%s: no argument names %s: %q", c.Name, v.Path, c.Args)
		}
	}
	if !slices.Equal(writable, folders) {
		t.Errorf("%s writes to %q, want %q", c.Name, writable, folders)
	}
}
