package test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
)

const enforce = "pod-security.kubernetes.io/enforce"

// beyondRestricted says what in the pods of an overlay Pod Security refuses at the level restricted. Overlays
// that are not here have a restricted namespace.
var beyondRestricted = map[string][]string{
	"egress-grpc":       {"restricted volume types", "runAsNonRoot != true", "runAsUser=0"},
	"edge-host-network": {"host namespaces", "probe or lifecycle host"},
	"edge-cni": {"host namespaces", "probe or lifecycle host", "restricted volume types", "runAsNonRoot != true",
		"runAsUser=0", "unrestricted capabilities"},
	"edge-services": {"host namespaces", "probe or lifecycle host", "restricted volume types", "runAsNonRoot != true",
		"runAsUser=0", "unrestricted capabilities"},
	"edge-websocket": {"host namespaces", "probe or lifecycle host"},
}

// TestPodSecurity: every pod of a restricted namespace is permitted there. Other namespaces have a reason to be
// privileged, and no further one.
func TestPodSecurity(t *testing.T) {
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	restricted := api.LevelVersion{Level: api.LevelRestricted, Version: api.LatestVersion()}
	for _, overlay := range overlays(t) {
		t.Run(overlay, func(t *testing.T) {
			objects := kustomized(t, overlay)
			level := "restricted"
			if beyondRestricted[overlay] != nil {
				level = "privileged"
			}
			if got := namespaceOf(t, objects).text("metadata", "labels", enforce); got != level {
				t.Errorf("the namespace enforces %q, want %q", got, level)
			}
			var reasons []string
			pods := templates(t, objects)
			for _, pod := range pods {
				result := policy.AggregateCheckResults(evaluator.EvaluatePod(restricted, &pod.ObjectMeta, &pod.Spec))
				for _, reason := range result.ForbiddenReasons {
					if !slices.Contains(beyondRestricted[overlay], reason) {
						t.Errorf("%s: %s", pod.Labels["app.kubernetes.io/component"], result.ForbiddenDetail())
					}
					reasons = append(reasons, reason)
				}
			}
			for _, reason := range beyondRestricted[overlay] {
				if !slices.Contains(reasons, reason) {
					t.Errorf("no pod needs %q, so beyondRestricted must not have it", reason)
				}
			}
			if len(pods) == 0 {
				t.Error("there are no pods")
			}
		})
	}
}

// templates returns the pod templates of all objects.
func templates(t *testing.T, objects []object) (all []corev1.PodTemplateSpec) {
	t.Helper()
	for _, o := range objects {
		template := o.at("spec", "template")
		if template == nil {
			continue
		}
		text, err := json.Marshal(template)
		if err != nil {
			t.Fatal(err)
		}
		var pod corev1.PodTemplateSpec
		if err = json.Unmarshal(text, &pod); err != nil {
			t.Fatalf("%s: %v", o.key(), err)
		}
		all = append(all, pod)
	}
	return all
}

// TestContainers: what Pod Security does not ask for, and every container has.
func TestContainers(t *testing.T) {
	images := []string{"tunnel:" + appVersion(t), "coredns/coredns:1.13.2"}
	for _, overlay := range overlays(t) {
		for _, pod := range templates(t, kustomized(t, overlay)) {
			for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
				where := overlay + " " + pod.Labels["app.kubernetes.io/component"]
				if !slices.Contains(images, c.Image) {
					t.Errorf("%s: image %q is none of %q", where, c.Image, images)
				}
				if c.SecurityContext == nil || c.SecurityContext.ReadOnlyRootFilesystem == nil ||
					!*c.SecurityContext.ReadOnlyRootFilesystem {
					t.Errorf("%s can write to its root file system", where)
				}
				if len(c.Resources.Requests) == 0 {
					t.Errorf("%s requests no resources", where)
				}
			}
		}
	}
}

// TestEdgesHaveNoSecret: the Secret of the cloud never reaches a node behind NAT.
func TestEdgesHaveNoSecret(t *testing.T) {
	edges := 0
	for _, overlay := range overlays(t) {
		for _, pod := range templates(t, kustomized(t, overlay)) {
			if pod.Labels["app.kubernetes.io/component"] != "edge" {
				continue
			}
			edges++
			text, err := json.Marshal(pod.Spec.Volumes)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(text), `"secret"`) {
				t.Errorf("%s mounts a Secret: %s", overlay, text)
			}
			if a := pod.Spec.AutomountServiceAccountToken; a == nil || *a {
				t.Errorf("%s mounts a token for the API server", overlay)
			}
		}
	}
	if edges == 0 {
		t.Error("no overlay has edges")
	}
}

// foreign are the API groups of other projects, whose types are not known here.
var foreign = []string{"cert-manager.io/v1", "monitoring.coreos.com/v1"}

// TestObjects: the API server knows every field of every object.
func TestObjects(t *testing.T) {
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	for _, overlay := range overlays(t) {
		for _, o := range kustomized(t, overlay) {
			if slices.Contains(foreign, o.text("apiVersion")) {
				continue
			}
			text, err := json.Marshal(o)
			if err != nil {
				t.Fatal(err)
			}
			if _, _, err = decoder.Decode(text, nil, nil); err != nil {
				t.Errorf("%s: %s: %v", overlay, o.key(), err)
			}
		}
	}
}

// TestLabels: every object says what it belongs to, and every workload also its version.
func TestLabels(t *testing.T) {
	version := appVersion(t)
	for _, overlay := range overlays(t) {
		for _, o := range kustomized(t, overlay) {
			for _, label := range []string{"app.kubernetes.io/name", "app.kubernetes.io/part-of"} {
				if o.text("metadata", "labels", label) != "tunnel" {
					t.Errorf("%s: %s has no label %s: tunnel", overlay, o.key(), label)
				}
			}
			component := o.text("metadata", "labels", "app.kubernetes.io/component")
			if component == "" && o.kind() != "Namespace" {
				t.Errorf("%s: %s has no component", overlay, o.key())
			}
			isWorkload := o.at("spec", "template") != nil && component != "coredns"
			if got := o.text("metadata", "labels", "app.kubernetes.io/version"); isWorkload && got != version {
				t.Errorf("%s: %s has version %q, want %q", overlay, o.key(), got, version)
			}
		}
	}
}
